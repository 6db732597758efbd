// A chart of one metric, a curve for each run. All charts share the step under the pointer and the range of steps.
"use strict";

const view = { smoothing: 0, isLog: false, range: null, hovered: null };

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
  // curves: [{name, color, steps, values}], `values` null where a step has none
  constructor(title, curves, height = 170) {
    this.title = title;
    this.curves = curves;
    this.canvas = new Canvas(height, (context, width, full) => this.draw(context, width, full));
    const wide = h("button", { className: "quiet", title: "Larger, or as before" }, "⤢");
    this.element = h("figure", { className: "chart", data: { metric: title } }, h("figcaption", {}, h("span", {}, title), wide), this.canvas.element);
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
      this.dragFrom = this.stepAt(event);
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", (event) => {
      const [from, to] = [this.dragFrom, this.stepAt(event)].sort((a, b) => a - b);
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

  get stepRange() {
    if (view.range) return view.range;
    const all = this.curves.flatMap(({ steps }) => (steps.length ? [steps[0], steps[steps.length - 1]] : []));
    const [low, high] = [Math.min(...all), Math.max(...all)];
    return low === high ? [low - 1, high + 1] : [low, high];
  }

  stepAt(event) {
    const { left, width } = this.bounds, [low, high] = this.stepRange;
    const x = event.clientX - this.canvas.element.getBoundingClientRect().left;
    return low + (Math.min(Math.max(x - left, 0), width) / width) * (high - low);
  }

  point(event) {
    if (this.dragFrom !== null) this.dragPixels += Math.abs(event.movementX);
    const at = this.stepAt(event);
    let nearest = null;
    for (const { steps, values } of this.curves) {
      steps.forEach((step, index) => {
        if (values[index] !== null && (nearest === null || Math.abs(step - at) < Math.abs(nearest - at))) nearest = step;
      });
    }
    if (nearest === null) return;
    view.hovered = nearest;
    const lines = [];
    for (const curve of this.curves) {
      const index = curve.steps.indexOf(nearest);
      if (index < 0 || curve.values[index] === null) continue;
      const mean = view.smoothing ? ` (smooth ${formatted(this.smooth(curve)[index])})` : "";
      const dot = h("i", { className: "dot", style: { background: curve.color } });
      lines.push(h("div", {}, dot, ` ${curve.name}: `, h("b", {}, formatted(curve.values[index], 6)), mean));
    }
    tooltip.show(event.clientX, event.clientY, h("div", { className: "muted" }, `step ${nearest}`), ...lines);
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
    const box = this.bounds, [firstStep, lastStep] = this.stepRange;
    let low = Infinity, high = -Infinity, isPositive = true;
    for (const { steps, values } of this.curves) {
      for (let index = 0; index < steps.length; index++) {
        if (values[index] === null || steps[index] < firstStep || steps[index] > lastStep) continue;
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
    const x = (step) => box.left + ((step - firstStep) / (lastStep - firstStep)) * box.width;
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
    const stepTicks = ticks(firstStep, lastStep, Math.max(2, Math.floor(box.width / 70))).filter(Number.isInteger);
    stepTicks.forEach((tick, index) => {
      context.textAlign = index === stepTicks.length - 1 && x(tick) > box.left + box.width - 20 ? "right" : "center";
      context.fillText(tick.toLocaleString("en-US"), x(tick), height - 6);
    });

    context.save();
    context.beginPath();
    context.rect(box.left - 4, 0, box.width + 8, height);
    context.clip();
    context.lineJoin = "round";
    for (const curve of this.curves) {
      context.strokeStyle = context.fillStyle = curve.color;
      context.globalAlpha = view.smoothing ? 0.25 : 1;
      this.line(context, curve, curve.values, x, y, view.smoothing ? 1 : 1.6);
      context.globalAlpha = 1;
      if (view.smoothing) this.line(context, curve, this.smooth(curve), x, y, 1.8);
    }
    if (view.hovered !== null && view.hovered >= firstStep && view.hovered <= lastStep) {
      context.strokeStyle = cssColor("muted");
      context.globalAlpha = 0.6;
      context.beginPath();
      context.moveTo(x(view.hovered), box.top);
      context.lineTo(x(view.hovered), box.top + box.height);
      context.stroke();
      context.globalAlpha = 1;
      for (const curve of this.curves) {
        const value = curve.values[curve.steps.indexOf(view.hovered)];
        if (value !== null && value !== undefined) this.dot(context, x(view.hovered), y(value), curve.color, 3.5);
      }
    }
    context.restore();
  }

  line(context, curve, values, x, y, width) {
    const points = curve.steps.map((step, index) => [step, values[index]]).filter(([, value]) => value !== null);
    context.lineWidth = width;
    context.beginPath();
    points.forEach(([step, value], index) => context[index ? "lineTo" : "moveTo"](x(step), y(value)));
    context.stroke();
    if (points.length <= 12) points.forEach(([step, value]) => this.dot(context, x(step), y(value), curve.color, 2.5));
  }

  dot(context, x, y, color, radius) {
    context.fillStyle = color;
    context.beginPath();
    context.arc(x, y, radius, 0, 2 * Math.PI);
    context.fill();
  }
}

function setRange(range) {
  view.range = range && range.map(Math.round);
  if (view.range && view.range[0] === view.range[1]) view.range = null;
  document.dispatchEvent(new Event("range"));
  Canvas.redrawAll();
}

// Of a metric, of the runs that have it. `metrics`: Run -> its part
function curvesOf(name, metrics) {
  const curves = [];
  for (const [run, { steps, values }] of metrics) {
    if (name in values) curves.push({ name: run.name, color: run.color, steps, values: values[name] });
  }
  return curves;
}
