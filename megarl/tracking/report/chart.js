// A chart of one metric, with a curve for each run. All charts share the x axis, its range, and the hovered position.
"use strict";

// `axis`: "step" or "time". `range` and `hovered` are values on it: steps, or seconds of wall time.
const view = { smoothing: 0, isLog: false, axis: "step", range: null, hovered: null };

// The wall time in seconds at the end of each step: the sum of the step durations. Null if the run logged no durations.
function wallTimes({ steps, values }) {
  const seconds = values["timing_s/step"];
  if (!seconds) return null;
  let sum = 0;
  return steps.map((_, index) => (sum += seconds[index] ?? 0));
}

// The unit in which a range of the x axis is displayed, and its size in the axis' own units.
function unitOf([low, high]) {
  if (view.axis === "step") return { name: "step", size: 1 };
  const span = Math.max(Math.abs(low), Math.abs(high));
  if (span < 120) return { name: "s", size: 1 };
  return span < 7200 ? { name: "min", size: 60 } : { name: "h", size: 3600 };
}

function rangeText(range) {
  const { name, size } = unitOf(range), text = range.map((edge) => formatted(edge / size, 3)).join("–");
  return view.axis === "step" ? `steps ${text}` : `${text} ${name}`;
}

// Exponential moving average, without the pull towards zero at the start.
function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

class Chart {
  // curves: [{name, color, steps, times, values}]. `values`: null where a step has none; `times`: null where a run has none
  constructor(title, curves, height = 170) {
    this.title = title;
    this.curves = curves;
    this.canvas = new Canvas(height, (context, width, full) => this.draw(context, width, full));
    const wide = h("button", { className: "quiet", title: "Enlarge or shrink this chart" }, "⤢");
    this.element = h("figure", { className: "chart", data: { metric: title } }, h("figcaption", {}, h("span", {}, title), wide), this.canvas.element);
    this.axisLabel = this.element.appendChild(h("div", { className: "axis-label muted" }));
    wide.addEventListener("click", () => {
      const isLarge = this.element.classList.toggle("large");
      this.canvas.resize(isLarge ? 380 : height);
    });
    const canvas = this.canvas.element;
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => {
      tooltip.hide();
      view.hovered = null;
      Canvas.redrawAll();
    });
    canvas.addEventListener("pointerdown", (event) => {
      this.dragFrom = this.xAt(event);
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", (event) => {
      const [from, to] = [this.dragFrom, this.xAt(event)].sort((a, b) => a - b);
      const isDrag = this.dragFrom !== null && this.dragPixels > 8 && to > from;
      this.dragFrom = null;
      this.dragPixels = 0;
      if (isDrag) setRange([from, to]);
    });
    canvas.addEventListener("dblclick", () => setRange(null));
    this.dragFrom = null;
    this.dragPixels = 0;
  }

  get bounds() {
    const left = 54, right = 10, top = 8, bottom = 22;
    return { left, top, width: Math.max(10, this.canvas.width - left - right), height: this.canvas.height - top - bottom };
  }

  // The curves that can be drawn on the current x axis, each with its positions as `xs`.
  get placed() {
    const placed = this.curves.map((curve) => ({ curve, xs: view.axis === "step" ? curve.steps : curve.times }));
    return placed.filter(({ xs }) => xs !== null);
  }

  get range() {
    if (view.range) return view.range;
    const all = this.placed.flatMap(({ xs }) => (xs.length ? [xs[0], xs[xs.length - 1]] : []));
    if (!all.length) return [0, 1];
    const [low, high] = [Math.min(...all), Math.max(...all)];
    return low === high ? [low - 1, high + 1] : [low, high];
  }

  // The index of the value that a curve shows at `x`: of the same step, or the closest in time; -1 if there is none.
  indexAt({ curve, xs }, x) {
    let nearest = -1;
    xs.forEach((each, index) => {
      if (curve.values[index] === null) return;
      if (nearest < 0 || Math.abs(each - x) < Math.abs(xs[nearest] - x)) nearest = index;
    });
    return view.axis === "step" && xs[nearest] !== x ? -1 : nearest;
  }

  xAt(event) {
    const { left, width } = this.bounds, [low, high] = this.range;
    const x = event.clientX - this.canvas.element.getBoundingClientRect().left;
    return low + (Math.min(Math.max(x - left, 0), width) / width) * (high - low);
  }

  point(event) {
    if (this.dragFrom !== null) this.dragPixels += Math.abs(event.movementX);
    const at = this.xAt(event), placed = this.placed;
    let nearest = null;
    for (const { curve, xs } of placed) {
      xs.forEach((x, index) => {
        if (curve.values[index] !== null && (nearest === null || Math.abs(x - at) < Math.abs(nearest - at))) nearest = x;
      });
    }
    if (nearest === null) return;
    view.hovered = nearest;
    const lines = [], isTime = view.axis === "time";
    for (const each of placed) {
      const { curve } = each, index = this.indexAt(each, nearest);
      if (index < 0) continue;
      const step = isTime ? h("span", { className: "muted" }, ` step ${curve.steps[index]}`) : null;
      const mean = view.smoothing ? ` (smooth ${formatted(this.smooth(curve)[index])})` : "";
      const dot = h("i", { className: "dot", style: { background: curve.color } });
      lines.push(h("div", {}, dot, ` ${curve.name}: `, h("b", {}, formatted(curve.values[index], 6)), mean, step));
    }
    tooltip.show(event.clientX, event.clientY, h("div", { className: "muted" }, isTime ? formattedSeconds(nearest) : `step ${nearest}`), ...lines);
    Canvas.redrawAll();
  }

  smooth(curve) {
    if (curve.smoothing !== view.smoothing) {
      curve.smooth = smoothed(curve.values, view.smoothing);
      curve.smoothing = view.smoothing;
    }
    return curve.smooth;
  }

  draw(context, width, height) {
    const box = this.bounds, [first, last] = this.range, unit = unitOf([first, last]), placed = this.placed;
    this.axisLabel.textContent = view.axis === "step" ? "step" : `wall time (${unit.name})`;
    let low = Infinity, high = -Infinity, isPositive = true;
    for (const { curve: { values }, xs } of placed) {
      for (let index = 0; index < xs.length; index++) {
        if (values[index] === null || xs[index] < first || xs[index] > last) continue;
        low = Math.min(low, values[index]);
        high = Math.max(high, values[index]);
        isPositive &&= values[index] > 0;
      }
    }
    if (low > high) return;
    const isLog = view.isLog && isPositive, scale = isLog ? Math.log10 : (value) => value;
    [low, high] = [scale(low), scale(high)];
    const margin = high > low ? (high - low) * 0.06 : Math.abs(high) * 0.1 || 1;
    [low, high] = [low - margin, high + margin];
    const x = (place) => box.left + ((place - first) / (last - first)) * box.width;
    const y = (value) => box.top + (1 - (scale(value) - low) / (high - low)) * box.height;

    context.font = `11px ${cssColor("font")}`;
    context.lineWidth = 1;
    context.strokeStyle = cssColor("grid");
    context.fillStyle = cssColor("muted");
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const tick of ticks(low, high, 5)) {
      const value = isLog ? 10 ** tick : tick, at = Math.round(y(value)) + 0.5;
      context.beginPath();
      context.moveTo(box.left, at);
      context.lineTo(box.left + box.width, at);
      context.stroke();
      context.fillText(formattedTick(value), box.left - 6, at);
    }
    context.textBaseline = "alphabetic";
    const marks = ticks(first / unit.size, last / unit.size, Math.max(2, Math.floor(box.width / 70)));
    for (const tick of marks.filter((each) => view.axis === "time" || Number.isInteger(each))) {
      const at = x(tick * unit.size);
      context.textAlign = at > box.left + box.width - 20 ? "right" : "center";
      context.fillText(tick.toLocaleString("en-US"), at, height - 6);
    }

    context.save();
    context.beginPath();
    context.rect(box.left - 4, 0, box.width + 8, height);
    context.clip();
    context.lineJoin = "round";
    for (const { curve, xs } of placed) {
      context.strokeStyle = context.fillStyle = curve.color;
      context.globalAlpha = view.smoothing ? 0.25 : 1;
      this.line(context, curve.color, xs, curve.values, x, y, view.smoothing ? 1 : 1.6);
      context.globalAlpha = 1;
      if (view.smoothing) this.line(context, curve.color, xs, this.smooth(curve), x, y, 1.8);
    }
    if (view.hovered !== null && view.hovered >= first && view.hovered <= last) {
      context.strokeStyle = cssColor("muted");
      context.globalAlpha = 0.6;
      context.beginPath();
      context.moveTo(x(view.hovered), box.top);
      context.lineTo(x(view.hovered), box.top + box.height);
      context.stroke();
      context.globalAlpha = 1;
      for (const each of placed) {
        const { curve, xs } = each, index = this.indexAt(each, view.hovered);
        if (index >= 0) this.dot(context, x(xs[index]), y(curve.values[index]), curve.color, 3.5);
      }
    }
    context.restore();
  }

  line(context, color, xs, values, x, y, width) {
    const points = xs.map((place, index) => [place, values[index]]).filter(([, value]) => value !== null);
    context.lineWidth = width;
    context.beginPath();
    points.forEach(([place, value], index) => context[index ? "lineTo" : "moveTo"](x(place), y(value)));
    context.stroke();
    if (points.length <= 12) points.forEach(([place, value]) => this.dot(context, x(place), y(value), color, 2.5));
  }

  dot(context, x, y, color, radius) {
    context.fillStyle = color;
    context.beginPath();
    context.arc(x, y, radius, 0, 2 * Math.PI);
    context.fill();
  }
}

function setRange(range) {
  view.range = range && (view.axis === "step" ? range.map(Math.round) : range);
  if (view.range && view.range[0] === view.range[1]) view.range = null;
  document.dispatchEvent(new Event("range"));
  Canvas.redrawAll();
}

// The curves of a metric, one for each run that has it. `metrics`: Run -> its metrics part
function curvesOf(name, metrics) {
  const curves = [];
  for (const [run, part] of metrics) {
    part.times ??= wallTimes(part);
    if (!(name in part.values)) continue;
    curves.push({ name: run.name, color: run.color, steps: part.steps, times: part.times, values: part.values[name] });
  }
  return curves;
}
