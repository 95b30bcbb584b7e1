/* Part 2: one chart of lines with bands, drawn by uPlot.
 *
 * A chart gets layers. Each has its own x values, so that evaluations of different runs need not be
 * at the same steps: {label, x, y, low, high, color, dash, kind, faint: [{x, y}], note(index)}, and
 * perhaps faintColor.
 * `kind` is "group" or "published". uPlot draws the lines; bands and faint lines are painted
 * below them.
 */

const LABEL_WIDTH = 78; // room for the names of lines, at their ends
const TICK_WIDTH = 28; // room for half of the last tick
const LABEL_HEIGHT = 13;
const charts = new Map(); // element -> chart
const zooms = new Map(); // key -> [low, high], kept when a chart is drawn again

class LineChart {
  constructor(holder, options) {
    this.holder = holder;
    this.options = options; // {key, layers(), xLabel, xValues, yLabel, yRange, yLimits, height, stepped}
    this.plot = null;
    this.keyIndex = null;
    charts.set(holder, this);
    holder.tabIndex = 0;
    holder.setAttribute("role", "img");
    holder.setAttribute("aria-roledescription", "chart");
    holder.addEventListener("keydown", (event) => this.onKey(event));
    holder.addEventListener("blur", () => this.leave());
    whenSeen(holder, () => this.draw());
  }

  draw() {
    const { holder, options } = this;
    this.plot?.destroy();
    this.plot = null;
    this.layers = options.layers().filter((layer) => layer.x.length > 0);
    holder.replaceChildren();
    if (this.layers.length === 0) {
      holder.append(element("p", { class: "empty" }, options.empty ?? "Nothing to draw."));
      return;
    }
    holder.setAttribute("aria-label", this.description());
    this.join();
    this.plot = new uPlot(this.settings(), this.joined, holder);
    const zoom = zooms.get(options.key);
    if (zoom) this.plot.setScale("x", { min: zoom[0], max: zoom[1] });
    this.watchSize();
  }

  description() {
    const names = this.layers.map((layer) => layer.label).join(", ");
    return `${this.options.title}: ${names}. Arrow keys move along the curve, plus and minus zoom, `
      + "0 shows everything.";
  }

  /** Put all layers on the union of their x values, which uPlot needs. */
  join() {
    const all = new Set();
    for (const layer of this.layers) for (const at of layer.x) if (isNumber(at)) all.add(at);
    const x = Float64Array.from(all).sort();
    const place = new Map(Array.from(x, (at, index) => [at, index]));
    this.joined = [Array.from(x)];
    for (const layer of this.layers) {
      const values = new Array(x.length).fill(null);
      layer.at = new Array(x.length).fill(-1);
      layer.x.forEach((at, index) => {
        if (!isNumber(at)) return;
        values[place.get(at)] = isNumber(layer.y[index]) ? layer.y[index] : null;
        layer.at[place.get(at)] = index;
      });
      this.joined.push(values);
    }
  }

  settings() {
    const { options } = this;
    const axis = {
      stroke: () => css("--muted"),
      grid: { stroke: () => css("--grid"), width: 1 },
      ticks: { stroke: () => css("--line"), width: 1, size: 5 },
      font: "12px system-ui, sans-serif",
      labelFont: "12px system-ui, sans-serif",
      labelSize: 22,
    };
    const values = options.xValues ?? short;
    return {
      width: this.width(),
      height: options.height ?? 300,
      legend: { show: false },
      padding: [10, this.labels() ? LABEL_WIDTH : TICK_WIDTH, 0, 0],
      scales: {
        x: { time: false, range: (plot, low, high) => this.xRange(low, high) },
        y: { range: (plot) => this.yRange(plot) },
      },
      axes: [
        { ...axis, label: options.xLabel, size: 32, space: 60, values: (_, all) => all.map(values) },
        {
          ...axis, label: options.yLabel, size: 58,
          values: (_, all) => all.map(options.yValues ?? short),
        },
      ],
      series: [{}, ...this.layers.map((layer) => this.series(layer))],
      cursor: {
        drag: { x: true, y: false, setScale: true, dist: 6 },
        dataIdx: (plot, series, hovered) => (series === 0 ? hovered : this.nearest(series, hovered)),
        points: { size: 7 },
        focus: { prox: -1 },
      },
      hooks: {
        drawAxes: [(plot) => this.paintBelow(plot)],
        draw: [(plot) => this.labels() && this.paintLabels(plot)],
        setCursor: [(plot) => this.onCursor(plot)],
        setScale: [(plot, scale) => scale === "x" && this.onZoom(plot)],
      },
    };
  }

  series(layer) {
    const few = layer.x.length <= 40 && layer.kind === "group";
    return {
      label: layer.label,
      stroke: () => layer.color(),
      width: layer.kind === "published" ? 1.4 : 2.2,
      dash: layer.dash,
      spanGaps: true,
      paths: this.options.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
      points: {
        show: !this.options.stepped && few,
        size: layer.x.length === 1 ? 8 : 5,
        fill: () => layer.color(),
        stroke: () => layer.color(),
      },
    };
  }

  nearest(series, hovered) {
    const values = this.joined[series];
    for (let off = 0; off < values.length; off += 1) {
      if (values[hovered - off] !== null && hovered - off >= 0) return hovered - off;
      if (hovered + off < values.length && values[hovered + off] !== null) return hovered + off;
    }
    return null;
  }

  xRange(low, high) {
    const x = this.joined[0];
    const whole = !isNumber(low) || (low === x[0] && high === x[x.length - 1]);
    return whole ? this.fullRange() : [low, high];
  }

  fullRange() {
    if (this.options.xRange) return this.options.xRange;
    // Published curves may go on for much longer than ours; they do not stretch the axis.
    const own = this.layers.filter((layer) => layer.kind === "group");
    const found = bounds((own.length ? own : this.layers).flatMap((layer) => [
      ...layer.x, ...layer.faint.flatMap((line) => line.x),
    ]));
    if (found === null) return [0, 1];
    const low = Math.min(0, found[0]);
    return found[1] > low ? [low, found[1] + 0.01 * (found[1] - low)] : [low, low + 1];
  }

  yRange(plot) {
    if (this.options.yRange) return this.options.yRange;
    const { min, max } = plot.scales.x;
    const seen = [];
    const inside = (at) => isNumber(at) && (min === undefined || min === null || (at >= min && at <= max));
    for (const layer of this.layers) {
      layer.x.forEach((at, index) => {
        if (inside(at)) seen.push(layer.y[index], layer.low?.[index], layer.high?.[index]);
      });
      for (const line of layer.faint) {
        line.x.forEach((at, index) => inside(at) && seen.push(line.y[index]));
      }
    }
    const found = bounds(seen);
    if (found === null) return [0, 1];
    const room = (found[1] - found[0]) * 0.06 || Math.abs(found[0]) * 0.1 || 1;
    const [lowest, highest] = this.options.yLimits ?? [-Infinity, Infinity];
    return [Math.max(lowest, found[0] - room), Math.min(highest, found[1] + room)];
  }

  paintBelow(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const layer of this.layers) {
      const color = layer.color();
      if (layer.low) this.paintBand(plot, layer, faded(color, layer.kind === "group" ? 0.17 : 0.12));
      ctx.strokeStyle = layer.faintColor?.() ?? faded(color, 0.3);
      ctx.lineWidth = uPlot.pxRatio;
      ctx.setLineDash([]);
      for (const line of layer.faint) this.paintLine(plot, line);
    }
    ctx.restore();
  }

  paintBand(plot, layer, color) {
    const { ctx } = plot;
    const known = layer.x.map((_, index) => index).filter(
      (index) => isNumber(layer.x[index]) && isNumber(layer.low[index]) && isNumber(layer.high[index]),
    );
    if (known.length < 2) return;
    const x = (index) => plot.valToPos(layer.x[index], "x", true);
    const y = (value) => plot.valToPos(value, "y", true);
    const stepped = this.options.stepped;
    ctx.fillStyle = color;
    ctx.beginPath();
    known.forEach((index, order) => {
      if (stepped && order) ctx.lineTo(x(index), y(layer.high[known[order - 1]]));
      ctx.lineTo(x(index), y(layer.high[index]));
    });
    for (let order = known.length - 1; order >= 0; order -= 1) {
      ctx.lineTo(x(known[order]), y(layer.low[known[order]]));
      if (stepped && order) ctx.lineTo(x(known[order]), y(layer.low[known[order - 1]]));
    }
    ctx.closePath();
    ctx.fill();
  }

  paintLine(plot, line) {
    const { ctx } = plot;
    ctx.beginPath();
    line.x.forEach((at, index) => {
      if (isNumber(at) && isNumber(line.y[index])) {
        ctx.lineTo(plot.valToPos(at, "x", true), plot.valToPos(line.y[index], "y", true));
      }
    });
    ctx.stroke();
  }

  labels() {
    return this.options.labels && this.layers.length > 1 && this.layers.length <= 14 && this.width() >= 380;
  }

  /** Write the name of each line beside its end. */
  paintLabels(plot) {
    const { ctx, bbox } = plot;
    const ratio = uPlot.pxRatio;
    const { max } = plot.scales.x;
    const ends = this.layers.map((layer) => {
      let last = layer.x.length - 1;
      while (last > 0 && (layer.x[last] > max || !isNumber(layer.y[last]))) last -= 1;
      return { layer, at: plot.valToPos(layer.y[last], "y", true) };
    }).filter(({ at }) => at >= bbox.top - 1 && at <= bbox.top + bbox.height + 1);
    ends.sort((first, second) => first.at - second.at);
    const step = LABEL_HEIGHT * ratio;
    let above = -Infinity;
    for (const end of ends) above = end.at = Math.max(end.at, above + step);
    let below = bbox.top + bbox.height + step;
    for (const end of ends.reverse()) below = end.at = Math.min(end.at, below - step);
    ctx.save();
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    for (const { layer, at } of ends) {
      ctx.font = `${layer.kind === "published" ? "italic" : "600"} ${11 * ratio}px system-ui, sans-serif`;
      ctx.fillStyle = layer.color();
      ctx.fillText(shortened(layer.name ?? layer.label), bbox.left + bbox.width + 5 * ratio, at);
    }
    ctx.restore();
  }

  onZoom(plot) {
    const { min, max } = plot.scales.x;
    const [low, high] = this.fullRange();
    const whole = Math.abs(min - low) < 1e-9 * (high - low) && Math.abs(max - high) < 1e-9 * (high - low);
    if (whole) zooms.delete(this.options.key);
    else zooms.set(this.options.key, [min, max]);
    this.options.onZoom?.(!whole);
  }

  zoomTo(low, high) {
    this.plot?.setScale("x", { min: low, max: high });
  }

  showAll() {
    zooms.delete(this.options.key);
    this.zoomTo(...this.fullRange());
  }

  onCursor(plot) {
    const { left, top, idx } = plot.cursor;
    if (left < 0 || idx === null || idx === undefined) {
      if (tooltipOwner === this) hideTooltip();
      return;
    }
    const box = plot.over.getBoundingClientRect();
    showTooltip(this, this.readout(idx), box.left + left, box.top + (top < 0 ? 20 : top));
  }

  /** The values of all layers next to a position. */
  readout(idx) {
    const at = this.joined[0][idx];
    const rows = this.layers.map((layer, number) => {
      const found = this.nearest(number + 1, idx);
      return found === null ? null : { layer, index: layer.at[found], value: this.joined[number + 1][found] };
    }).filter((row) => row !== null && this.isNear(row, at));
    rows.sort((first, second) => second.value - first.value);
    return element("div", {},
      element("strong", {}, this.options.cursorLabel(at)),
      element("table", {}, element("tbody", {}, rows.slice(0, 14).map(({ layer, index, value }) => element(
        "tr", { class: layer.kind },
        element("td", {}, swatch(layer.color(), layer.dash, layer.kind === "group" ? 2.5 : 1.5)),
        element("td", {}, layer.label),
        element("td", { class: "number" }, element("b", {}, (this.options.showValue ?? score)(value))),
        element("td", { class: "muted" }, layer.note?.(index) ?? ""),
      )))),
      rows.length > 14 ? element("p", { class: "muted" }, `and ${rows.length - 14} more`) : null,
    );
  }

  /** A curve that ended long before the cursor has no value there. */
  isNear(row, at) {
    const known = row.layer.x.filter(isNumber);
    const last = known[known.length - 1];
    const spacing = known.length > 1 ? (last - known[0]) / (known.length - 1) : Infinity;
    return at <= last + spacing && at >= known[0] - spacing;
  }

  onKey(event) {
    drawWaiting(this.holder);
    if (!this.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const { min, max } = this.plot.scales.x;
    const count = this.joined[0].length;
    const middle = this.keyIndex === null ? (min + max) / 2 : this.joined[0][this.keyIndex];
    const zoom = (factor) => this.zoomTo(middle - (middle - min) * factor, middle + (max - middle) * factor);
    const moves = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -count, End: count };
    if (event.key in moves) {
      const from = this.keyIndex ?? (moves[event.key] > 0 ? -1 : count);
      this.keyIndex = Math.max(0, Math.min(count - 1, from + moves[event.key]));
      const left = this.plot.valToPos(this.joined[0][this.keyIndex], "x");
      this.plot.setCursor({ left, top: 20 });
    } else if (event.key === "+" || event.key === "=") zoom(0.6);
    else if (event.key === "-") {
      const [low, high] = this.fullRange();
      this.zoomTo(Math.max(low, middle - (middle - min) / 0.6), Math.min(high, middle + (max - middle) / 0.6));
    } else if (event.key === "0") this.showAll();
    else if (event.key === "Escape") this.leave();
    else return;
    event.preventDefault();
  }

  leave() {
    this.keyIndex = null;
    if (tooltipOwner === this) hideTooltip();
    this.plot?.setCursor({ left: -10, top: -10 });
  }

  width() {
    return Math.max(200, Math.floor(this.holder.clientWidth || 400));
  }

  watchSize() {
    if (this.observer) return;
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.holder);
  }

  resize() {
    if (this.plot && this.width() !== this.plot.width && this.holder.clientWidth) {
      this.plot.setSize({ width: this.width(), height: this.plot.height });
    }
  }

  remove() {
    this.observer?.disconnect();
    this.plot?.destroy();
    charts.delete(this.holder);
    seen?.unobserve(this.holder);
  }
}

function shortened(text) {
  return text.length > 12 ? `${text.slice(0, 11)}…` : text;
}

/* Charts are drawn when they come near the window, all of them before printing. */

const waiting = new Map();
const seen = "IntersectionObserver" in window
  ? new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) drawWaiting(entry.target);
  }, { rootMargin: "600px" })
  : null;

function whenSeen(holder, draw) {
  if (seen === null) {
    queueMicrotask(draw);
    return;
  }
  waiting.set(holder, draw);
  seen.observe(holder);
}

function drawWaiting(holder) {
  const draw = waiting.get(holder);
  waiting.delete(holder);
  seen?.unobserve(holder);
  draw?.();
}

function drawAll() {
  for (const holder of [...waiting.keys()]) drawWaiting(holder);
}

/** Draw the charts again, with other colors or other lines. */
function redrawCharts() {
  for (const chart of charts.values()) if (chart.plot || !waiting.has(chart.holder)) chart.draw();
}

function removeCharts(section) {
  for (const [holder, chart] of charts) {
    if (section.contains(holder)) {
      waiting.delete(holder);
      chart.remove();
    }
  }
}

/* Values under the cursor */

let tooltipOwner = null;

function showTooltip(owner, content, x, y) {
  const tooltip = byId("tooltip");
  tooltipOwner = owner;
  tooltip.replaceChildren(content);
  tooltip.hidden = false;
  const { width, height } = tooltip.getBoundingClientRect();
  const left = x + 18 + width < window.innerWidth ? x + 18 : Math.max(4, x - 18 - width);
  const top = Math.max(4, Math.min(y + 14, window.innerHeight - height - 4));
  tooltip.style.left = `${left}px`;
  tooltip.style.top = `${top}px`;
}

function hideTooltip() {
  tooltipOwner = null;
  byId("tooltip").hidden = true;
}

/** A card with a title, buttons and a chart. */
function chartCard(title, about, options, attributes) {
  const holder = element("div", { class: "chart", style: { "min-height": `${options.height}px` }, ...attributes });
  const reset = element("button", { type: "button", class: "quiet", hidden: true }, "Show all");
  const expand = element("button", { type: "button", class: "quiet", "aria-pressed": "false" }, "Enlarge");
  const card = element("div", { class: "card" },
    element("header", {},
      element("h3", {}, title),
      element("div", { class: "buttons" }, reset, expand)),
    holder,
    about ? element("p", { class: "about" }, about) : null);
  const chart = new LineChart(holder, {
    ...options,
    title,
    onZoom: (zoomed) => { reset.hidden = !zoomed; },
  });
  reset.addEventListener("click", () => chart.showAll());
  const setLarge = (large) => {
    card.classList.toggle("expanded", large);
    expand.setAttribute("aria-pressed", String(large));
    expand.textContent = large ? "Shrink" : "Enlarge";
    chart.options.height = large ? 460 : options.height;
    holder.style.setProperty("min-height", `${chart.options.height ?? 300}px`); // before it is drawn
  };
  expand.addEventListener("click", () => {
    if (!state.enlarged.delete(options.key)) state.enlarged.add(options.key);
    setLarge(state.enlarged.has(options.key));
    chart.draw();
  });
  setLarge(state.enlarged.has(options.key));
  holder.addEventListener("mouseleave", () => chart.leave());
  return card;
}
