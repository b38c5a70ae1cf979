// Small charts on a canvas: lines or stacked areas over the last minutes, and bars.

const KEEP = 150; // points
const LEAST = 30; // points that a chart has room for from the beginning

function colour(i) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--c${i % 4}`).trim();
}

export class Chart {
  // series: names; kind: "line" | "area" (stacked) | "bars" (the last point only; the series grow with it)
  constructor(parent, title, series, { kind = "line", unit = "", format = short, top = null } = {}) {
    Object.assign(this, { series, kind, unit, format, top, points: [] });
    const figure = document.createElement("figure");
    figure.innerHTML = "<figcaption><span></span><span class=now></span></figcaption><canvas></canvas>";
    figure.querySelector("span").textContent = title;
    figure.dataset.title = title;
    this.now = figure.querySelector(".now");
    this.canvas = figure.querySelector("canvas");
    parent.append(figure);
  }

  add(values) {
    this.points.push(values);
    if (this.points.length > KEEP) this.points.shift();
    const known = this.points.findLast((point) => point.some((value) => value !== null)) || [];
    this.now.replaceChildren(...this.series.flatMap((name, i) => this.kind === "bars" ? [] : [this.#label(name, known[i], i)]));
    this.draw();
  }

  #label(name, value, i) {
    const span = document.createElement("span");
    span.style.color = colour(i);
    span.textContent = ` ${name} ${value === null || value === undefined ? "-" : this.format(value) + this.unit}`;
    return span;
  }

  draw() {
    const { canvas } = this;
    const scale = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return; // not on show
    canvas.width = width * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const high = this.#highest();
    this.#grid(pen, width, height, high);
    if (this.kind === "bars") this.#bars(pen, width, height, high);
    else this.#curves(pen, width, height, high);
  }

  #highest() {
    if (this.top !== null) return this.top;
    const values = (this.kind === "bars" ? this.points.slice(-1) : this.points).map((point) => this.kind === "area"
      ? point.reduce((sum, value) => sum + (value || 0), 0) : Math.max(0, ...point.map((value) => value || 0)));
    return nice(Math.max(0, ...values));
  }

  #grid(pen, width, height, high) {
    const style = getComputedStyle(document.documentElement);
    pen.strokeStyle = style.getPropertyValue("--line");
    pen.fillStyle = style.getPropertyValue("--faint");
    pen.font = "11px system-ui, sans-serif";
    for (const share of [0, 0.5, 1]) {
      const y = height - 4 - share * (height - 18);
      pen.beginPath();
      pen.moveTo(0, y);
      pen.lineTo(width, y);
      pen.stroke();
      if (share) pen.fillText(this.format(high * share) + this.unit, 2, y - 3);
    }
  }

  #curves(pen, width, height, high) {
    const room = Math.max(LEAST, this.points.length);
    const x = (i) => width * (i + room - this.points.length) / (room - 1);
    const y = (value) => height - 4 - Math.min(1, value / high) * (height - 18);
    let floor = this.points.map(() => 0);
    this.series.forEach((_, s) => {
      const base = floor;
      if (this.kind === "area") floor = floor.map((value, i) => value + (this.points[i][s] || 0));
      const heights = this.kind === "area" ? floor : this.points.map((point) => point[s]);
      pen.beginPath();
      let drawing = false;
      heights.forEach((value, i) => {
        if (value === null || value === undefined) return;
        if (drawing) pen.lineTo(x(i), y(value));
        else pen.moveTo(x(i), y(value));
        drawing = true;
      });
      if (this.kind === "area") {
        for (let i = base.length - 1; i >= 0; i--) pen.lineTo(x(i), y(base[i]));
        pen.closePath();
        pen.globalAlpha = 0.75;
        pen.fillStyle = colour(s);
        pen.fill();
        pen.globalAlpha = 1;
      } else {
        pen.strokeStyle = pen.fillStyle = colour(s);
        pen.lineWidth = 1.8;
        pen.lineJoin = "round";
        pen.stroke();
        pen.lineWidth = 1;
        const last = heights.findLastIndex((value) => value !== null && value !== undefined);
        if (last >= 0) { // also a single point is seen
          pen.beginPath();
          pen.arc(x(last) - 2, y(heights[last]), 2.4, 0, 7);
          pen.fill();
        }
      }
    });
  }

  #bars(pen, width, height, high) {
    const last = this.points.at(-1) || [];
    const step = (width - 40) / Math.max(4, last.length);
    last.forEach((value, i) => {
      const tall = Math.min(1, (value || 0) / high) * (height - 18);
      pen.fillStyle = colour(1);
      pen.fillRect(40 + i * step, height - 4 - tall, step * 0.7, tall);
      pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--text");
      pen.fillText(String(i + 1), 40 + i * step + step * 0.3, height - 8);
    });
  }
}

function nice(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

export function short(value) {
  if (value >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  if (value >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
  return value >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}
