// Elements and number formats. Text becomes text nodes, never HTML, so that text written by a model is only displayed.
"use strict";

function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name === "data") Object.assign(element.dataset, value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name.startsWith("aria-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const COLORS = ["#2f7ed8", "#e0702a", "#2f9e60", "#9a5fc7", "#c2993a", "#2aa3b0", "#d1488a", "#7d8794"];
// For items that may outnumber the runs.
const MORE_COLORS = [...COLORS, "#8db8ec", "#f0b48c", "#8ccfaa", "#c9abe3", "#e0cb94", "#8fd0d6", "#eaa5c8", "#b6bec8"];
const runColor = (number) => COLORS[number % COLORS.length];

function formatted(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(Math.max(1, digits - 2)).replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return value.toLocaleString("en-US", { maximumSignificantDigits: digits });
}

const percentage = (share) => `${formatted(100 * share, 3)} %`;

// Short format for the axis of a chart.
const formattedTick = (value) =>
  Math.abs(value) >= 1e4 ? value.toLocaleString("en-US", { notation: "compact", maximumSignificantDigits: 4 }) : formatted(Math.abs(value) < 1e-12 ? 0 : value, 3);

function formattedSeconds(seconds) {
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toPrecision(3)} ms`;
  if (seconds < 90) return `${seconds.toPrecision(3)} s`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(1)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

// Minutes and seconds, with enough digits to distinguish ticks that are `step` seconds apart.
function clock(seconds, step) {
  const digits = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)), whole = Math.abs(seconds);
  const minutes = Math.floor(whole / 60 + 1e-9), rest = Math.max(0, whole - 60 * minutes).toFixed(digits);
  return `${seconds < 0 ? "-" : ""}${minutes}:${rest.padStart(digits ? digits + 3 : 2, "0")}`;
}

// Round numbers between two others, about `count` of them.
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let tick = Math.ceil(low / step); tick * step <= high + step * 1e-9; tick++) found.push(tick * step);
  return found;
}

const tooltip = {
  element: null,
  show(x, y, ...content) {
    this.element ||= document.body.appendChild(h("div", { id: "tooltip", role: "tooltip" }));
    this.element.replaceChildren(...content);
    this.element.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const left = x + 16 + width > innerWidth ? x - 16 - width : x + 16;
    const top = y + 16 + height > innerHeight ? y - 12 - height : y + 16;
    Object.assign(this.element.style, { left: `${Math.max(4, left)}px`, top: `${Math.max(4, top)}px` });
  },
  hide() {
    if (this.element) this.element.hidden = true;
  },
};

// A canvas at the resolution of the screen, redrawn when its size or the colors change.
class Canvas {
  constructor(height, draw) {
    this.element = h("canvas", { style: { height: `${height}px` } });
    this.draw = draw;
    this.height = height;
    this.isVisible = this.wasInPage = false;
    Canvas.all.add(this);
    this.observers = [
      new ResizeObserver(() => this.redraw()),
      new IntersectionObserver((entries) => {
        this.isVisible = entries[entries.length - 1].isIntersecting;
        this.wasInPage ||= this.element.isConnected;
        this.redraw();
      }),
    ];
    for (const observer of this.observers) observer.observe(this.element);
  }

  redraw() {
    if (!this.isVisible || this.isQueued) return;
    this.isQueued = true;
    requestAnimationFrame(() => {
      this.isQueued = false;
      const width = this.element.clientWidth, ratio = devicePixelRatio || 1;
      if (!width) return;
      this.width = width;
      this.element.width = Math.round(width * ratio);
      this.element.height = Math.round(this.height * ratio);
      const context = this.element.getContext("2d");
      context.scale(ratio, ratio);
      this.draw(context, width, this.height);
    });
  }

  resize(height) {
    this.height = height;
    this.element.style.height = `${height}px`;
    this.redraw();
  }

  static redrawAll() {
    for (const canvas of Canvas.all) canvas.redraw();
  }

  static forgetRemoved() {
    for (const canvas of Canvas.all) {
      if (!canvas.wasInPage || canvas.element.isConnected) continue;
      for (const observer of canvas.observers) observer.disconnect();
      Canvas.all.delete(canvas);
    }
  }
}
Canvas.all = new Set();

const cssColor = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function select(options, value, onChange, label) {
  const element = h("select", { "aria-label": label }, options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
  element.addEventListener("change", () => {
    element.blur(); // a live page does not refresh while a select has focus
    onChange(element.value);
  });
  return element;
}

function input(type, properties, onInput) {
  const element = h("input", { type, ...properties });
  element.addEventListener("input", () => onInput(type === "checkbox" ? element.checked : element.value));
  return element;
}
