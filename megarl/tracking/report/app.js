// The page: header, tabs, and polling for changes in a live report.
"use strict";

const TABS = {
  summary: ["Summary", summaryTab],
  curves: ["Curves", curvesTab],
  samples: ["Samples", samplesTab],
  timeline: ["Timeline", timelineTab],
  memory: ["Memory", memoryTab],
  configuration: ["Configuration", configurationTab],
  failures: ["Failures", failuresTab],
};
const ASK_EVERY_MS = 2000;

const app = {
  signal: null, // removes the event listeners of a tab when another is shown
  turn: 0,
  isBehind: false, // new data is not shown yet

  start() {
    report.start();
    this.status = h("span", { id: "status", className: "muted" }, report.isLive ? "live" : "");
    this.links = Object.entries(TABS).map(([name, [title]]) => h("a", { href: `#${name}`, data: { tab: name } }, title));
    this.body = h("div", { id: "tab" });
    const theme = h("button", { className: "quiet", id: "theme", title: "Switch between light and dark" }, "◐");
    theme.addEventListener("click", () => {
      const isDark = cssColor("is-dark") === "1";
      document.documentElement.dataset.theme = isDark ? "light" : "dark";
      this.recolor();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolor());
    const head = h("header", {}, h("h1", {}, "megarl ", h("span", { className: "muted" }, "report")), h("div", { className: "runs" }, report.runs.map((run) => this.chip(run))), this.status, theme);
    document.getElementById("app").append(head, h("nav", {}, this.links), this.body);
    addEventListener("hashchange", () => this.show());
    this.show();
    if (report.isLive) setTimeout(() => this.ask(), ASK_EVERY_MS);
  },

  recolor() {
    Canvas.redrawAll();
    if (this.tab === "timeline") this.show();
  },

  chip(run) {
    const chip = h("button", { className: "run-chip", "aria-pressed": "true", title: "Show or hide this run" }, dotOf(run), ` ${run.name}`);
    chip.addEventListener("click", () => {
      if (run.isShown && report.shown.length === 1) return;
      run.isShown = !run.isShown;
      chip.setAttribute("aria-pressed", String(run.isShown));
      this.show();
    });
    return chip;
  },

  // The new tab is built off-screen and replaces the old one when it is complete, so that the layout does not jump.
  async show() {
    const name = location.hash.slice(1), turn = ++this.turn;
    this.tab = name in TABS ? name : "summary";
    for (const link of this.links) link.classList.toggle("chosen", link.dataset.tab === this.tab);
    const abort = new AbortController(), body = h("div", { id: "tab", data: { tab: this.tab } });
    const before = this.abort;
    this.signal = abort.signal;
    await TABS[this.tab][1].render(body);
    if (turn !== this.turn) return abort.abort();
    before?.abort();
    this.abort = abort;
    tooltip.hide();
    const focused = document.activeElement?.id, typed = document.activeElement?.value;
    const scrolled = ["#sample-table", "#sample"].map((name) => [name, this.body.querySelector(name)?.scrollTop]);
    this.body.replaceWith(body);
    this.body = body;
    Canvas.forgetRemoved();
    for (const [name, top] of scrolled) if (top) body.querySelector(name)?.scrollTo({ top });
    this.focus(focused && body.querySelector(`input[id="${focused}"]`), typed);
    body.dataset.ready = "true";
  },

  // Typing continues in the same field of the new tab.
  focus(field, typed) {
    if (!field) return;
    field.focus();
    if (field.type === "search") field.setSelectionRange(field.value.length, field.value.length);
    if (field.value === typed || typed === undefined) return;
    field.value = typed;
    field.dispatchEvent(new Event("input"));
  },

  async ask() {
    try {
      this.isBehind = (await report.ask()) || this.isBehind;
      this.status.textContent = `live, ${new Date().toLocaleTimeString()}`;
      this.status.classList.remove("problem");
      if (this.isBehind && document.activeElement?.tagName !== "SELECT") {
        this.isBehind = false;
        await this.show();
      }
    } catch (error) {
      if (!(error instanceof TypeError)) throw error; // raised by fetch if the server does not respond
      this.status.textContent = "the server has stopped";
      this.status.classList.add("problem");
    }
    setTimeout(() => this.ask(), ASK_EVERY_MS);
  },
};

app.start();
