// The timeline tab: what ran where and when. The mouse wheel zooms, dragging pans.
"use strict";

const ROW_HEIGHT = 22, LABEL_WIDTH = 150, AXIS_HEIGHT = 24;

const timelineTab = {
  run: null,
  step: null,

  async render(root) {
    const runs = report.shown.filter((run) => run.has("timeline"));
    if (!runs.length) return void root.append(h("p", { className: "muted" }, "No timeline yet: a run writes it every ten steps and when it ends."));
    if (!runs.includes(this.run)) this.run = runs[0];
    const part = await this.run.part("timeline");
    const parts = [];
    if (runs.length > 1) {
      parts.push(h("label", {}, "run ", select(runs.map((run) => [String(run.number), run.name]), String(this.run.number), (value) => {
        this.run = report.runs[Number(value)];
        this.step = null;
        app.show();
      }, "Run")));
    }
    if (part.problem) root.append(h("p", { className: "problem" }, part.problem));
    if (!part.row.length) return void root.append(h("div", { className: "toolbar" }, parts), h("p", { className: "muted" }, "The timeline is empty."));
    root.append(new TimelineView(part, parts).element);
  },
};

class TimelineView {
  constructor(part, controls) {
    this.part = part;
    this.starts = [];
    let at = 0;
    for (const gap of part.gap) this.starts.push((at += gap));
    this.first = this.starts[0];
    this.starts = this.starts.map((start) => (start - this.first) / 1e4); // seconds
    this.lengths = part.length.map((length) => length / 1e4);
    this.end = this.starts.reduce((end, start, index) => Math.max(end, start + this.lengths[index]), 0);
    const steps = [...new Set(part.step)].sort((a, b) => a - b);
    const totals = part.names.map(() => 0);
    part.name.forEach((name, index) => (totals[name] += this.lengths[index]));
    const order = totals.map((_, name) => name).sort((a, b) => totals[b] - totals[a]);
    this.color = new Map(order.map((name, rank) => [name, part.names[name] === "step" ? cssColor("grid") : MORE_COLORS[rank % MORE_COLORS.length]]));
    this.span = [0, this.end];
    this.canvas = new Canvas(AXIS_HEIGHT + part.rows.length * ROW_HEIGHT + 4, (context, width) => this.draw(context, width));
    this.canvas.element.classList.add("timeline");
    const chooser = select([["", "all steps"], ...steps.map((step) => [String(step), `step ${step}`])], "", (value) => this.show(value), "Step");
    chooser.id = "timeline-step";
    const turn = (text, change) => {
      const button = h("button", { className: "quiet", "aria-label": change < 0 ? "Previous step" : "Next step" }, text);
      button.addEventListener("click", () => {
        const at = steps.indexOf(Number(chooser.value || steps[steps.length - 1])) + (chooser.value ? change : 0);
        chooser.value = String(steps[Math.max(0, Math.min(steps.length - 1, at))]);
        this.show(chooser.value);
      });
      return button;
    };
    const legend = order.slice(0, 16).map((name) =>
      h("span", {}, h("i", { className: "swatch", style: { background: this.color.get(name) } }), ` ${part.names[name]} `, h("span", { className: "muted" }, formattedSeconds(totals[name]))));
    this.element = h("div", {},
      h("div", { className: "toolbar" }, controls, turn("‹", -1), chooser, turn("›", 1), h("span", { className: "muted hint" }, "scroll to zoom, drag to move")),
      h("div", { className: "card" }, this.canvas.element),
      h("div", { className: "legend timeline-legend" }, legend));
    this.listen();
    const known = timelineTab.step === null ? steps[steps.length - 1] : timelineTab.step;
    chooser.value = steps.includes(Number(known)) && known !== "" ? String(known) : "";
    this.show(chooser.value);
  }

  show(step) {
    timelineTab.step = step;
    if (step === "") this.span = [0, this.end];
    else {
      let [from, to] = [Infinity, 0];
      this.part.step.forEach((each, index) => {
        if (each !== Number(step)) return;
        from = Math.min(from, this.starts[index]);
        to = Math.max(to, this.starts[index] + this.lengths[index]);
      });
      const margin = (to - from) * 0.01;
      this.span = [from - margin, to + margin];
    }
    this.canvas.redraw();
  }

  listen() {
    const canvas = this.canvas.element;
    let dragged = null;
    const secondsOf = (pixels) => (pixels / (this.canvas.width - LABEL_WIDTH)) * (this.span[1] - this.span[0]);
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const at = this.span[0] + secondsOf(event.offsetX - LABEL_WIDTH), factor = Math.exp(event.deltaY * 0.0015);
      this.span = this.span.map((edge) => at + (edge - at) * factor);
      this.canvas.redraw();
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      dragged = event.clientX;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", () => (dragged = null));
    canvas.addEventListener("pointerleave", () => tooltip.hide());
    canvas.addEventListener("pointermove", (event) => {
      if (dragged !== null) {
        const moved = secondsOf(dragged - event.clientX);
        dragged = event.clientX;
        this.span = this.span.map((edge) => edge + moved);
        return this.canvas.redraw();
      }
      const row = Math.floor((event.offsetY - AXIS_HEIGHT) / ROW_HEIGHT), at = this.span[0] + secondsOf(event.offsetX - LABEL_WIDTH), slack = secondsOf(2);
      let found = -1; // the shortest, since phases are nested
      this.part.row.forEach((each, index) => {
        const isHit = each === row && at >= this.starts[index] - slack && at <= this.starts[index] + this.lengths[index] + slack;
        if (isHit && (found < 0 || this.lengths[index] < this.lengths[found])) found = index;
      });
      if (found < 0) return tooltip.hide();
      const { pool, label } = this.part.rows[row];
      tooltip.show(event.clientX, event.clientY,
        h("div", {}, h("b", {}, this.part.names[this.part.name[found]]), ` ${formattedSeconds(this.lengths[found])}`),
        h("div", { className: "muted" }, `${label}, ${pool}`),
        h("div", { className: "muted" }, `step ${this.part.step[found]}, at ${formattedSeconds(this.starts[found])}`));
    });
  }

  draw(context, width) {
    const [from, to] = this.span, scale = (width - LABEL_WIDTH) / (to - from), x = (seconds) => LABEL_WIDTH + (seconds - from) * scale;
    context.font = `11px ${cssColor("font")}`;
    context.textBaseline = "middle";
    const { rows, row, name, names } = this.part;
    rows.forEach(({ pool, label }, number) => {
      const top = AXIS_HEIGHT + number * ROW_HEIGHT;
      if (number === 0 || rows[number - 1].pool !== pool) {
        context.strokeStyle = cssColor("grid");
        context.beginPath();
        context.moveTo(0, top + 0.5);
        context.lineTo(width, top + 0.5);
        context.stroke();
      }
      context.fillStyle = cssColor("text");
      context.textAlign = "left";
      context.fillText(label, 4, top + ROW_HEIGHT / 2, LABEL_WIDTH - 12);
    });
    context.fillStyle = cssColor("muted");
    context.strokeStyle = cssColor("grid");
    const marks = ticks(from, to, Math.max(2, Math.floor((width - LABEL_WIDTH) / 90)));
    for (const tick of marks) {
      context.textAlign = x(tick) > width - 20 ? "right" : "center";
      context.fillText(clock(tick, marks[1] - marks[0] || 1), Math.min(x(tick), width), 10);
      context.beginPath();
      context.moveTo(x(tick), AXIS_HEIGHT - 6);
      context.lineTo(x(tick), this.canvas.height);
      context.stroke();
    }
    context.save();
    context.beginPath();
    context.rect(LABEL_WIDTH, 0, width - LABEL_WIDTH, this.canvas.height);
    context.clip();
    const longestFirst = this.order ||= row.map((_, index) => index).sort((a, b) => this.lengths[b] - this.lengths[a]);
    for (const index of longestFirst) {
      const left = x(this.starts[index]), size = Math.max(1, this.lengths[index] * scale);
      if (left > width || left + size < LABEL_WIDTH) continue;
      const top = AXIS_HEIGHT + row[index] * ROW_HEIGHT + 3;
      context.fillStyle = this.color.get(name[index]);
      context.fillRect(left, top, size, ROW_HEIGHT - 6);
      const label = names[name[index]], seen = Math.max(left, LABEL_WIDTH), room = Math.min(left + size, width) - seen;
      if (label !== "step" && room > label.length * 6.5 + 8) { // the phases of a step are drawn over it
        context.fillStyle = COLORS.includes(this.color.get(name[index])) ? "#fff" : "#1b2230";
        context.textAlign = "left";
        context.fillText(label, seen + 4, top + (ROW_HEIGHT - 6) / 2 + 0.5);
      }
    }
    context.restore();
  }
}
