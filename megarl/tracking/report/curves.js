// The tabs of curves: all metrics in groups, and memory.
"use strict";

const FIRST = [
  "critic/score/mean", "val/score/mean", "sft/loss", "val/loss", "actor/reward_kl_penalty", "actor/kl_loss", "actor/entropy",
  "response_length/mean", "actor/pg_clipfrac", "actor/grad_norm", "training/rollout_probs_diff_max", "timing_s/step", "perf/throughput",
];
const ABOUT_MEMORY = /^memory\/|rss|bytes|_gb$|memory/;

async function metricsOfShown() {
  const found = new Map();
  for (const run of report.shown) {
    const part = await run.part("metrics");
    if (part) found.set(run, part);
  }
  return found;
}

function metricNames(metrics) {
  const names = new Set();
  for (const { values } of metrics.values()) for (const name of Object.keys(values)) names.add(name);
  return [...names].sort();
}

const curvesTab = {
  search: "",
  closed: new Set(),

  async render(root) {
    const metrics = await metricsOfShown(), body = h("div", {});
    const fill = () => this.fill(body, metrics);
    const reset = h("button", { className: "pill", title: "All steps again" });
    const showRange = () => {
      reset.hidden = !view.range;
      reset.textContent = view.range ? `steps ${view.range[0]}–${view.range[1]} ✕` : "";
    };
    reset.addEventListener("click", () => setRange(null));
    document.addEventListener("range", showRange, { signal: app.signal });
    showRange();
    const percent = h("output", {}, view.smoothing.toFixed(2));
    const redraw = (change) => (value) => {
      change(value);
      Canvas.redrawAll();
    };
    root.append(
      h("div", { className: "toolbar" },
        input("search", { placeholder: "Filter metrics, such as kl|entropy", value: this.search, id: "metric-filter", "aria-label": "Filter metrics" }, (value) => {
          this.search = value;
          fill();
        }),
        h("label", {}, "Smoothing ", input("range", { min: 0, max: 0.99, step: 0.01, value: view.smoothing, id: "smoothing" }, redraw((value) => {
          view.smoothing = Number(value);
          percent.textContent = view.smoothing.toFixed(2);
        })), percent),
        h("label", {}, input("checkbox", { checked: view.isLog, id: "log-scale" }, redraw((value) => (view.isLog = value))), " log scale"),
        reset,
        h("span", { className: "muted hint" }, "drag over a curve to zoom, double-click for all steps"),
      ),
      body,
    );
    fill();
  },

  fill(body, metrics) {
    const names = metricNames(metrics);
    if (!names.length) return body.replaceChildren(h("p", { className: "muted" }, "No step has ended yet."));
    const words = this.search.toLowerCase().split("|").map((word) => word.trim()).filter(Boolean);
    const wanted = names.filter((name) => !words.length || words.some((word) => name.toLowerCase().includes(word)));
    const groups = new Map();
    if (!words.length) groups.set("overview", FIRST.filter((name) => names.includes(name)));
    for (const name of wanted) {
      const group = name.includes("/") ? name.split("/")[0] : "others";
      groups.set(group, [...(groups.get(group) || []), name]);
    }
    body.replaceChildren(...[...groups].filter(([, members]) => members.length).map(([group, members]) => this.group(group, members, metrics)));
    if (!wanted.length) body.append(h("p", { className: "muted" }, "No metric has this in its name."));
  },

  group(name, members, metrics) {
    const details = h("details", { open: !this.closed.has(name), className: "group", data: { group: name } });
    details.append(
      h("summary", {}, name, h("span", { className: "muted" }, ` ${members.length}`)),
      h("div", { className: "charts" }, members.map((member) => new Chart(member, curvesOf(member, metrics)).element)),
    );
    details.addEventListener("toggle", () => this.closed[details.open ? "delete" : "add"](name));
    return details;
  },
};

const memoryTab = {
  async render(root) {
    const metrics = await metricsOfShown();
    for (const run of report.shown) {
      const { plan } = await run.part("about");
      if (!plan) continue;
      root.append(
        h("section", { className: "card" },
          h("h2", {}, h("i", { className: "dot", style: { background: run.color } }), ` ${run.name}: what was planned`),
          h("p", { className: "muted" }, "GiB at most in the fullest device of each pool, as megarl check reckons them."),
          h("div", { className: "scroll" }, h("table", { className: "plain" },
            h("thead", {}, h("tr", {}, plan.columns.map((cell, index) => h("th", { className: index > 1 ? "number" : "" }, cell)))),
            h("tbody", {}, plan.rows.map((row) => h("tr", {}, row.map((cell, index) => h("td", { className: index > 1 ? "number" : "" }, cell))))),
          )),
        ),
      );
    }
    const names = metricNames(metrics).filter((name) => ABOUT_MEMORY.test(name));
    if (names.length) {
      root.append(h("h2", {}, "Measured"), h("div", { className: "charts" }, names.map((name) => new Chart(name, curvesOf(name, metrics)).element)));
    }
    if (!root.children.length) root.append(h("p", { className: "muted" }, "These runs have logged nothing about memory."));
  },
};
