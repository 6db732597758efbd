// The curves tab, with all metrics in groups, and the memory tab.
"use strict";

// The charts of the overview, in this order. A pattern stands for every metric that matches it.
const OVERVIEW = [
  "reward/mean", /^reward\/.+\/mean$/, "val/score/mean", "sft/loss", "dpo/loss", "reward_model/loss", "val/loss", "dpo/accuracy",
  "reward_model/accuracy", "val/accuracy", "actor/reward_kl_penalty", "actor/kl_loss",
  "actor/entropy", "response_length/mean", "actor/pg_clipfrac", "actor/grad_norm", "sft/grad_norm",
  "training/rollout_probs_diff_max", "timing_s/step", "perf/predicted_step_s", "perf/throughput",
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

function overviewOf(names) {
  return OVERVIEW.flatMap((wanted) => names.filter((name) => (wanted instanceof RegExp ? wanted.test(name) : name === wanted)));
}

// The training reward. Runs of older versions logged it under its other name only.
const rewardMetric = (names) => (names.includes("reward/mean") ? "reward/mean" : "critic/score/mean");

// The headline metrics of a run.
const headlineMetrics = (names) => [
  rewardMetric(names), "val/score/mean", "sft/loss", "dpo/loss", "reward_model/loss", "val/loss", "val/accuracy",
].filter((name) => names.includes(name));

// Selects steps or wall time as the x axis of all charts.
function axisSelect(metrics) {
  const untimed = [...metrics].filter(([, part]) => !wallTimes(part)).map(([run]) => run.name);
  if (metrics.size && untimed.length === metrics.size) return null;
  const chosen = select([["step", "step"], ["time", "wall time"]], view.axis, (axis) => {
    view.axis = axis;
    setRange(null);
  }, "X axis");
  const title = "Wall time is the sum of timing_s/step. It excludes startup and the time between the parts of a resumed run.";
  const note = untimed.length ? h("span", { className: "muted hint" }, ` no times in ${untimed.join(", ")}`) : null;
  return h("label", { title }, "x axis ", chosen, note);
}

const curvesTab = {
  search: "",
  closed: new Set(),

  async render(root) {
    const metrics = await metricsOfShown(), body = h("div", {});
    const fill = () => this.fill(body, metrics);
    const reset = h("button", { className: "pill", title: "Show all steps" });
    const showRange = () => {
      reset.hidden = !view.range;
      reset.textContent = view.range ? `${rangeText(view.range)} ✕` : "";
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
        input("search", { placeholder: "Filter metrics, e.g. kl|entropy", value: this.search, id: "metric-filter", "aria-label": "Filter metrics" }, (value) => {
          this.search = value;
          fill();
        }),
        h("label", {}, "Smoothing ", input("range", { min: 0, max: 0.99, step: 0.01, value: view.smoothing, id: "smoothing" }, redraw((value) => {
          view.smoothing = Number(value);
          percent.textContent = view.smoothing.toFixed(2);
        })), percent),
        axisSelect(metrics),
        h("label", {}, input("checkbox", { checked: view.isLog, id: "log-scale" }, redraw((value) => (view.isLog = value))), " log scale"),
        reset,
        h("span", { className: "muted hint" }, "drag over a chart to zoom, double-click to reset"),
      ),
      body,
    );
    fill();
  },

  fill(body, metrics) {
    const names = metricNames(metrics);
    if (!names.length) return body.replaceChildren(h("p", { className: "muted" }, "No step is complete yet."));
    const words = this.search.toLowerCase().split("|").map((word) => word.trim()).filter(Boolean);
    const wanted = names.filter((name) => !words.length || words.some((word) => name.toLowerCase().includes(word)));
    const groups = new Map();
    if (!words.length) groups.set("overview", overviewOf(names));
    for (const name of wanted) {
      const group = name.includes("/") ? name.split("/")[0] : "others";
      groups.set(group, [...(groups.get(group) || []), name]);
    }
    body.replaceChildren(...[...groups].filter(([, members]) => members.length).map(([group, members]) => this.group(group, members, metrics)));
    if (!wanted.length) body.append(h("p", { className: "muted" }, "No metric name matches the filter."));
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

// The first column names the kind of memory; all others are numbers.
const planCell = (tag, text, column) => h(tag, { className: column > 0 ? "number" : "" }, text);

const memoryTab = {
  async render(root) {
    const metrics = await metricsOfShown();
    for (const run of report.shown) {
      const { plan } = await run.part("about");
      if (!plan) continue;
      root.append(
        h("section", { className: "card" },
          h("h2", {}, h("i", { className: "dot", style: { background: run.color } }), ` ${run.name}: planned`),
          h("p", { className: "muted" }, "Estimated peak memory in GiB of each role, on the fullest device of each pool, as printed by megarl check."),
          h("div", { className: "scroll" }, h("table", { className: "plain" },
            h("thead", {}, h("tr", {}, plan.columns.map((cell, column) => planCell("th", cell, column)))),
            h("tbody", {}, plan.rows.map((row) => h("tr", {}, row.map((cell, column) => planCell("td", cell, column))))),
          )),
        ),
      );
    }
    const names = metricNames(metrics).filter((name) => ABOUT_MEMORY.test(name));
    if (names.length) {
      root.append(h("h2", {}, "Measured"), h("div", { className: "charts" }, names.map((name) => new Chart(name, curvesOf(name, metrics)).element)));
    }
    if (!root.children.length) root.append(h("p", { className: "muted" }, "These runs logged no memory metrics."));
  },
};
