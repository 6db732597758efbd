// The samples tab: a table to filter and sort, and a view of one sample token by token.
"use strict";

const PAGE_ROWS = 100;
const ORDERS = {
  step: ["newest step first", (a, b) => b.step - a.step],
  best: ["highest score first", (a, b) => b.score - a.score],
  worst: ["lowest score first", (a, b) => a.score - b.score],
  advantage: ["largest advantage first", (a, b) => Math.abs(b.advantage ?? 0) - Math.abs(a.advantage ?? 0)],
  share: ["largest share of the loss first", (a, b) => (b.share ?? -1) - (a.share ?? -1)],
  gap: ["largest log-prob gap first", (a, b) => (b.maxGap ?? -1) - (a.maxGap ?? -1)],
  long: ["longest first", (a, b) => (b.response_length ?? 0) - (a.response_length ?? 0)],
  short: ["shortest first", (a, b) => (a.response_length ?? 0) - (b.response_length ?? 0)],
};
const NUMBERS = new Set(["step", "score", "adv.", "tokens"]); // headings of the numeric columns
const COLORINGS = { probability: "probability", advantage: "advantage", share: "share of the loss", gap: "log-prob gap", none: "nothing" };
const ABSENT = { gap: "the trainer computed no log-probs", share: "a former version kept no shares" };
const CORRECTION = "algorithm.rollout_correction.";
// What leaves a token out of the loss, by its number in the file.
const EXCLUDED = [
  null,
  `its response was rejected (${CORRECTION}rejection)`,
  "it was sampled by weights older than rollout.max_staleness (rollout.late: mask)",
  "its advantage is negative, and the policy has made its response unlikely (algorithm.policy_loss.off_policy_limit)",
];

async function allSamples(run) {
  const parts = await Promise.all(run.sampleSteps.map((step) => run.part(`samples/${step}`)));
  const [heldOut, about] = await Promise.all(["generations", "about"].map((name) => run.part(name)));
  const rows = parts.flatMap((part) => part?.rows ?? []);
  for (const row of heldOut?.rows ?? []) rows.push({ ...row, isHeldOut: true, source: row.data_source, prompt: "" });
  for (const row of rows) Object.assign(row, { run, config: about?.config ?? {} });
  const present = parts.filter(Boolean);
  const problems = [...present, heldOut].map((part) => part?.problem).filter(Boolean);
  const [kept, all] = [present.reduce((sum, part) => sum + part.rows.length, 0), present.reduce((sum, part) => sum + (part.of ?? 0), 0)];
  return { rows, problems, kept, all };
}

// An episode's text includes all turns and results; its `response` is only the last turn.
const wholeText = (row) => row.episode ? [...row.tokens.places].map((place) => row.tokens.header.tokens[place]).join("") : row.response;

// Marks the tokens of tool calls, which <tool_call> and its end tag delimit.
function markCalls(tokens) {
  const text = tokens.map((token) => token.textContent).join("");
  const calls = [...text.matchAll(/<tool_call>[^]*?(<\/tool_call>|$)/g)].map((found) => [found.index, found.index + found[0].length]);
  let start = 0;
  for (const token of tokens) {
    const end = start + token.textContent.length;
    if (calls.some(([from, to]) => start < to && end > from)) token.classList.add("call");
    start = end;
  }
}

const samplesTab = {
  filter: { run: "all", step: "all", kind: "training", least: "", most: "", finish: "all", text: "", order: "step" },
  coloring: "probability",
  page: 0,
  chosen: null, // the key of the chosen sample, since a live report reads the samples again

  keyOf: (row) => [row.run.number, row.step, row.uid, row.response, row.isHeldOut].join("\u0000"),

  async render(root) {
    const found = await Promise.all(report.shown.map(allSamples));
    this.rows = found.flatMap(({ rows }) => rows);
    if (!this.rows.some((row) => !row.isHeldOut) && this.rows.length) this.filter.kind = "held-out";
    for (const problem of found.flatMap(({ problems }) => problems)) root.append(h("p", { className: "problem" }, problem));
    if (!this.rows.length) {
      root.append(h("p", { className: "muted" }, "No samples were kept; set tracking.samples_every_steps to keep some."));
      return;
    }
    const [kept, all] = ["kept", "all"].map((name) => found.reduce((sum, each) => sum + each[name], 0));
    this.table = h("div", { className: "scroll", id: "sample-table" });
    this.pager = h("div", { className: "pager" });
    this.detail = h("section", { className: "card detail", id: "sample" });
    root.append(
      this.toolbar(),
      ...(kept < all ? [h("p", { className: "muted" }, `The first ${kept.toLocaleString()} of ${all.toLocaleString()} samples in the files are in this page.`)] : []),
      h("div", { className: "split" }, h("div", {}, this.pager, this.table), this.detail),
    );
    this.fill();
  },

  toolbar() {
    const isHeldOut = this.filter.kind === "held-out";
    const steps = [...new Set(this.rows.filter((row) => Boolean(row.isHeldOut) === isHeldOut).map((row) => row.step))].sort((a, b) => a - b);
    if (this.filter.step !== "all" && !steps.includes(Number(this.filter.step))) this.filter.step = "all";
    const finishes = [...new Set(this.rows.map((row) => row.finish).filter(Boolean))].sort();
    const set = (name) => (value) => {
      this.filter[name] = value;
      this.page = 0;
      this.fill();
    };
    const field = (label, control) => h("label", {}, `${label} `, control);
    const number = (name, label) => input("number", { value: this.filter[name], step: "any", className: "short", id: `score-${name}`, "aria-label": label }, set(name));
    const parts = [
      input("search", { placeholder: "Find text", value: this.filter.text, id: "sample-text", "aria-label": "Text" }, set("text")),
      field("samples", select([["training", "training"], ["held-out", "held-out prompts"]], this.filter.kind, (value) => {
        this.filter.kind = value;
        app.show(); // its steps differ
      }, "Kind of samples")),
      field("step", select([["all", "all"], ...steps.map((step) => [String(step), String(step)])], this.filter.step, set("step"), "Step")),
      h("label", {}, "score ", number("least", "Lowest score"), " to ", number("most", "Highest score")),
      field("ended by", select([["all", "any"], ...finishes.map((each) => [each, each])], this.filter.finish, set("finish"), "Finish reason")),
      field("order", select(Object.entries(ORDERS).map(([key, [text]]) => [key, text]), this.filter.order, set("order"), "Order")),
    ];
    if (report.shown.length > 1) {
      const options = [["all", "all"], ...report.shown.map((run) => [String(run.number), run.name])];
      if (!options.some(([key]) => key === this.filter.run)) this.filter.run = "all";
      parts.unshift(field("run", select(options, this.filter.run, set("run"), "Run")));
    } else this.filter.run = "all";
    return h("div", { className: "toolbar" }, parts);
  },

  get found() {
    const { run, step, kind, least, most, finish, text, order } = this.filter, needle = text.toLowerCase();
    const wanted = this.rows.filter((row) =>
      Boolean(row.isHeldOut) === (kind === "held-out")
      && (run === "all" || row.run.number === Number(run))
      && (step === "all" || row.step === Number(step))
      && (least === "" || row.score >= Number(least))
      && (most === "" || row.score <= Number(most))
      && (finish === "all" || row.finish === finish)
      && (!needle || [row.prompt, wholeText(row), row.ground_truth].some((each) => each.toLowerCase().includes(needle))));
    return wanted.sort(ORDERS[order][1]);
  },

  fill() {
    const found = this.found, first = Math.min(this.page * PAGE_ROWS, Math.max(0, found.length - 1)), shown = found.slice(first, first + PAGE_ROWS);
    const turn = (change, text, isOff) => {
      const button = h("button", { className: "quiet", disabled: isOff, "aria-label": text === "‹" ? "Previous" : "Next" }, text);
      button.addEventListener("click", () => {
        this.page += change;
        this.fill();
      });
      return button;
    };
    const range = found.length ? `${(first + 1).toLocaleString()}–${(first + shown.length).toLocaleString()} of ${found.length.toLocaleString()}` : "none";
    this.pager.replaceChildren(h("span", { id: "num-found" }, range), turn(-1, "‹", first === 0), turn(1, "›", first + PAGE_ROWS >= found.length));
    const severalRuns = report.shown.length > 1, isHeldOut = this.filter.kind === "held-out";
    const head = [...(severalRuns ? [""] : []), "step", "uid", "score", ...(isHeldOut ? [] : ["adv.", "tokens"]), isHeldOut ? "truth" : "prompt", "response"];
    const body = h("tbody", {}, shown.map((row) => this.line(row, severalRuns, isHeldOut)));
    const cells = head.map((text) => h("th", { className: NUMBERS.has(text) ? "number" : "" }, text));
    this.table.replaceChildren(h("table", {}, h("thead", {}, h("tr", {}, cells)), body));
    const chosen = shown.find((row) => this.keyOf(row) === this.chosen) || shown[0];
    if (chosen) this.choose(chosen);
    else this.detail.replaceChildren(h("p", { className: "muted" }, "No sample matches the filter."));
  },

  line(row, severalRuns, isHeldOut) {
    const number = (value, digits = 3) => h("td", { className: "number" }, formatted(value, digits));
    const short = (text) => h("td", { className: "text" }, text.length > 160 ? `${text.slice(0, 160)} …` : text);
    const line = h("tr", { tabIndex: 0, data: { uid: row.uid, step: row.step } },
      severalRuns ? h("td", {}, h("i", { className: "dot", style: { background: row.run.color }, title: row.run.name })) : null,
      number(row.step), h("td", { className: "uid" }, row.uid), number(row.score),
      isHeldOut ? null : [number(row.advantage), number(row.response_length)],
      short(isHeldOut ? row.ground_truth : row.prompt), short(row.response));
    line.addEventListener("click", () => this.choose(row));
    line.addEventListener("keydown", (event) => {
      const next = { Enter: line, ArrowDown: line.nextElementSibling, ArrowUp: line.previousElementSibling }[event.key];
      if (!next) return;
      event.preventDefault();
      next.focus();
      next.click();
    });
    row.line = line;
    return line;
  },

  choose(row) {
    this.chosen = this.keyOf(row);
    for (const line of this.table.querySelectorAll("tr.chosen")) line.classList.remove("chosen");
    row.line.classList.add("chosen");
    const facts = [["step", row.step], ["uid", row.uid], ["source", row.source], ["score", formatted(row.score)]];
    if (!row.isHeldOut) {
      const { parts } = row.tokens.header;
      if (parts.length > 1) row.score_parts.forEach((value, index) => facts.push([parts[index], formatted(value)]));
      for (const [name, value] of Object.entries(row.numbers ?? {})) facts.push([name, formatted(value)]);
      const numExcluded = row.tokens.excluded.filter((reason) => reason > 0).length;
      facts.push(["advantage", formatted(row.advantage)], ["largest gap", formatted(row.maxGap, 3)], ["weights", `version ${row.weight_version}`]);
      if (row.share !== null) facts.push(["of the step's loss", percentage(row.share)]);
      if (numExcluded) facts.push(["not in the loss", `${numExcluded} of ${row.response_length} tokens`]);
      facts.push(["tokens", `${row.prompt_length} + ${row.response_length}`], ["ended by", row.episode ? row.episode.end : row.finish]);
    }
    if (row.episode) {
      const { rewards, calls, errors } = row.episode, failed = Object.entries(errors).map(([kind, number]) => `${number} ${kind}`);
      facts.push(["turns", rewards.length], ["calls", failed.length ? `${calls}, of which ${failed.join(", ")}` : calls]);
    }
    if (report.shown.length > 1) facts.unshift(["run", row.run.name]);
    const siblings = row.isHeldOut ? [] : this.rows.filter((each) => each.run === row.run && each.step === row.step && each.uid === row.uid && !each.isHeldOut);
    this.detail.replaceChildren(
      h("dl", { className: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value))))),
      ...(siblings.length > 1 ? [this.group(row, siblings)] : []),
      ...(row.prompt ? [h("h3", {}, "Prompt"), h("pre", { className: "text" }, row.prompt)] : []),
      h("h3", {}, row.episode ? "Conversation" : "Response"),
      ...(row.isHeldOut ? [h("pre", { className: "text", id: "response" }, row.response)] : this.response(row)),
      h("h3", {}, "Ground truth"),
      h("pre", { className: "text" }, row.ground_truth),
    );
  },

  group(row, siblings) {
    const chips = siblings.map((each) => {
      const chip = h("button", { className: each === row ? "chip chosen" : "chip", title: each.response.slice(0, 300) }, formatted(each.score, 3));
      chip.addEventListener("click", () => {
        if (!each.line?.isConnected) this.line(each, report.shown.length > 1, false);
        this.choose(each);
      });
      return chip;
    });
    return h("p", { className: "siblings" }, h("span", { className: "muted" }, "scores of this prompt's samples "), chips);
  },

  response(row) {
    const text = h("div", { className: row.episode ? "episode" : "tokens", id: "response" }), legend = h("span", { className: "legend" });
    const { header, places } = row.tokens;
    const tokens = [...places].map((place, index) => h("span", { tabIndex: -1, data: { index } }, header.tokens[place].replaceAll("\n", "⏎\n") || "∅"));
    const paint = () => {
      const scale = this.scale(row);
      tokens.forEach((token, index) => (token.style.background = token.isOthers ? "" : scale.color(index)));
      tokens.forEach((token, index) => token.classList.toggle("excluded", row.tokens.excluded[index] > 0));
      legend.replaceChildren(...scale.legend);
    };
    text.append(...(row.episode ? this.turns(row.episode, tokens) : tokens));
    text.addEventListener("pointermove", (event) => {
      const token = event.target.closest("[data-index]");
      if (token) this.explain(row, Number(token.dataset.index), event);
      else tooltip.hide();
    });
    text.addEventListener("pointerleave", () => tooltip.hide());
    const choice = select(Object.entries(COLORINGS), this.coloring, (value) => {
      this.coloring = value;
      paint();
    }, "Color of tokens");
    choice.id = "coloring";
    paint();
    return [h("div", { className: "toolbar" }, h("label", {}, "color: ", choice), legend), text];
  },

  // Returns a block for each turn of the model and each result, whose tokens were not sampled.
  turns({ lengths, rewards }, tokens) {
    let start = 0;
    return lengths.map((length, number) => {
      const isModel = number % 2 === 0, turn = number / 2, written = tokens.slice(start, (start += length));
      const reward = isModel && rewards[turn] ? h("span", { className: "state open" }, `reward ${formatted(rewards[turn])}`) : null;
      if (isModel) markCalls(written);
      else for (const token of written) token.isOthers = true;
      return h("div", { className: `turn ${isModel ? "model" : "environment"}` },
        h("div", { className: "author" }, isModel ? `model, turn ${turn + 1}` : "answer", reward), h("div", { className: "tokens" }, written));
    });
  },

  explain(row, index, event) {
    const { header, places, logProbs, gaps, advantages, shares } = row.tokens, own = logProbs[index], gap = gaps[index];
    const line = (name, ...value) => h("div", {}, h("span", { className: "muted" }, `${name} `), ...value);
    const ofLog = (value) => [h("b", {}, formatted(Math.exp(value), 3)), ` (log ${formatted(value, 3)})`];
    const isOthers = event.target.isOthers; // not sampled by the model
    const lines = isOthers ? [] : Number.isNaN(gap)
      ? [line("probability, by the engine", ...ofLog(own))]
      : [line("probability, trainer", ...ofLog(own)), line("probability, engine", ...ofLog(own - gap)), line("log-prob gap", formatted(gap, 3)), line("ratio, trainer to engine", formatted(Math.exp(gap), 3))];
    const ofLoss = [line("advantage", formatted(advantages[index], 3)), ...this.weight(row, index, line)];
    if (!Number.isNaN(shares[index])) ofLoss.push(line("share of the step's loss", percentage(shares[index] / header.all_tokens), ` (${formatted(shares[index], 2)} times the average)`));
    tooltip.show(event.clientX, event.clientY,
      h("div", {}, h("code", {}, JSON.stringify(header.tokens[places[index]])), h("span", { className: "muted" }, ` id ${header.ids[places[index]]}, token ${index + 1} of ${places.length}`)),
      ...lines, ...(isOthers ? [h("div", { className: "muted" }, "not written by the model, excluded from the loss")] : ofLoss));
  },

  // Returns the weight of a token in the loss, the rule that limits it, and what leaves the token out.
  weight({ tokens: { weights, excluded }, config }, index, line) {
    const weight = weights[index], reason = EXCLUDED[excluded[index]], lines = [];
    if (!Number.isNaN(weight)) {
      const isTruncated = config[`${CORRECTION}kind`] === "truncate" && weight >= Number(config[`${CORRECTION}high`]) * (1 - 2 ** -10);
      const isMasked = config[`${CORRECTION}kind`] === "mask" && weight === 0;
      lines.push(line("weight in the loss", formatted(weight, 3), isTruncated ? `, limited (${CORRECTION}high)` : isMasked ? `, outside ${CORRECTION}low and high` : ""));
    }
    if (reason) lines.push(h("div", {}, h("b", {}, "not in the loss: "), reason));
    return lines;
  },

  // Returns the color of each token, and the legend. The two signs use a color-blind-safe pair of colors.
  scale(row) {
    const { logProbs, gaps, advantages, shares } = row.tokens, strong = 0.75;
    const swatch = (color, text) => [h("i", { className: "swatch", style: { background: color } }), ` ${text} `];
    if (this.coloring === "none") return { color: () => "", legend: [] };
    if (this.coloring === "probability") {
      const color = (probability) => `rgba(224, 112, 42, ${(strong * (1 - probability)).toFixed(3)})`;
      return { color: (index) => color(Math.exp(logProbs[index])), legend: [1, 0.5, 0].flatMap((each) => swatch(color(each), String(each))) };
    }
    const values = { gap: gaps, share: shares, advantage: advantages }[this.coloring], most = values.reduce((largest, value) => Math.max(largest, Math.abs(value) || 0), 0);
    const color = (value) => `rgba(${value < 0 ? "224, 112, 42" : "47, 126, 216"}, ${(strong * Math.min(1, Math.abs(value) / (most || 1)) || 0).toFixed(3)})`;
    if (!most) return { color: () => "", legend: [Number.isNaN(values[0]) ? ABSENT[this.coloring] : "0 everywhere"] };
    if (this.coloring === "share") return { color: (index) => color(values[index]), legend: [0, most].flatMap((each) => swatch(color(each), `${formatted(each, 2)} times the average`)) };
    return { color: (index) => color(values[index]), legend: [-most, 0, most].flatMap((each) => swatch(color(each), formatted(each, 2))) };
  },
};
