/* Part 11, of a sweep only: parallel coordinates, a line per trial through its values on all axes. */

const BRUSH_STEP = 0.05;
const BRUSH_REST_MS = 200;
let brushTimer = 0;

/** Whether a trial is within all brushes. */
function isInside(trial) {
  for (const [place, [low, high]] of sweep.brushes) {
    const share = brushScales()[place](trial);
    if (share === null || share < low - 1e-9 || share > high + 1e-9) return false;
  }
  return true;
}

let knownScales = null;

/** By axis, where a trial is on it; the last axis is the objective. */
function brushScales() {
  if (knownScales === null) {
    const objective = objectiveScale(2);
    knownScales = [
      ...sweep.data.parameters.map((parameter, place) => {
        const { at } = parameterScale(parameter, 2);
        return (trial) => at(trial.at[place]);
      }),
      (trial) => (isNumber(trial.value) ? objective.at(trial.value) : null),
    ];
  }
  return knownScales;
}

class ParallelChart extends TrialChart {
  constructor(holder) {
    super(holder, 380);
    this.count = sweep.data.parameters.length + 1;
    this.smallest = Math.max(300, 96 * this.count);
    this.drag = null;
    holder.addEventListener("pointerdown", (event) => this.onDown(event));
    holder.addEventListener("pointerup", (event) => this.onUp(event));
    holder.addEventListener("pointercancel", () => { this.drag = null; });
  }

  x(place) {
    const side = Math.min(70, this.drawnWidth / this.count / 2);
    return this.count === 1 ? this.drawnWidth / 2 : side + (place * (this.drawnWidth - 2 * side)) / (this.count - 1);
  }

  y(share) {
    return this.height - 26 - share * (this.height - 26 - 44);
  }

  paint(plot) {
    const lines = svg("g", { class: "lines" });
    this.points = new Map(drawn().map((trial) => [trial, brushScales().map((at) => at(trial))]));
    for (const trial of drawingOrder(this.points.keys())) {
      const path = this.points.get(trial).map((share, place) => (share === null ? "" : `${place ? "L" : "M"}${round(this.x(place))} ${round(this.y(share))}`));
      lines.append(svg("path", {
        class: `line ${trialClass(trial)}`, "data-trial": trial.number, d: path.join(""),
        "stroke-opacity": trial.rank === 0 ? 1 : strength(trial),
      }));
    }
    plot.append(lines);
    for (let place = 0; place < this.count; place += 1) plot.append(this.axis(place));
    this.paintBrushes();
  }

  axis(place) {
    const parameter = sweep.data.parameters[place];
    const scale = parameter ? parameterScale(parameter, 5) : objectiveScale(5);
    const name = this.name(place);
    const x = this.x(place);
    const room = this.drawnWidth / this.count;
    const group = svg("g", {
      class: "axis", tabindex: 0, role: "slider", "aria-orientation": "vertical", "data-parameter": place,
      "aria-label": `${parameter?.key ?? "objective"}: lower end of the brush`, "aria-valuemin": 0, "aria-valuemax": 100,
    },
    svg("rect", { class: "hit", x: x - 16, width: 32, y: this.y(1) - 4, height: this.y(0) - this.y(1) + 8 }),
    svg("line", { class: "axis-line", x1: x, x2: x, y1: this.y(0), y2: this.y(1) }),
    svg("text", { class: "axis-name", x, y: 18, "text-anchor": "middle" }, fitted(name, room), svg("title", {}, parameter?.key ?? objectiveName())));
    for (const tick of scale.ticks) group.append(
      svg("line", { class: "axis-line", x1: x - 4, x2: x, y1: this.y(tick.at), y2: this.y(tick.at) }),
      svg("text", { class: "tick-text halo", x: x - 7, y: this.y(tick.at) + 4, "text-anchor": "end" },
        fitted(tick.text, Math.min(90, room * 0.6)), svg("title", {}, tick.text)));
    group.append(svg("rect", { class: "brush", x: x - 9, width: 18, rx: 3 }));
    group.addEventListener("keydown", (event) => this.onAxisKey(event, place));
    return group;
  }

  name(place) {
    return place < this.count - 1 ? parameterName(place) : "objective";
  }

  paintBrushes() {
    for (const group of this.plot.querySelectorAll(".axis")) {
      const place = Number(group.dataset.parameter);
      const brush = sweep.brushes.get(place);
      const [low, high] = brush ?? [0, 1];
      const mark = group.querySelector(".brush");
      mark.setAttribute("y", this.y(high));
      mark.setAttribute("height", Math.max(2, this.y(low) - this.y(high)));
      mark.classList.toggle("empty", !brush);
      group.setAttribute("aria-valuenow", Math.round(100 * low));
      group.setAttribute("aria-valuetext", brush
        ? `${this.valueText(place, low)} to ${this.valueText(place, high)}` : "everything");
    }
  }

  /** The value at a share of an axis. */
  valueText(place, share) {
    const parameter = sweep.data.parameters[place];
    if (!parameter) {
      const [low, high] = objectiveEnds();
      return score(low + share * (high - low));
    }
    if (parameter.scale === "choice") {
      return parameter.values[Math.min(parameter.values.length - 1, Math.floor(share * parameter.values.length))];
    }
    const { low, high } = parameter;
    return parameterText(parameter, parameter.scale === "log" ? low * (high / low) ** share : low + share * (high - low));
  }

  setBrush(place, low, high) {
    const ends = [Math.max(0, Math.min(low, high)), Math.min(1, Math.max(low, high))];
    if (ends[0] <= 0 && ends[1] >= 1) sweep.brushes.delete(place);
    else sweep.brushes.set(place, ends);
    brushesChanged();
  }

  onAxisKey(event, place) {
    const [low, high] = sweep.brushes.get(place) ?? [0, 1];
    const change = { ArrowUp: BRUSH_STEP, ArrowDown: -BRUSH_STEP, PageUp: 0.25, PageDown: -0.25 }[event.key];
    if (change !== undefined) {
      if (event.shiftKey) this.setBrush(place, low, Math.max(low + BRUSH_STEP, high + change));
      else this.setBrush(place, Math.min(high - BRUSH_STEP, low + change), high);
    } else if (event.key === "Home") this.setBrush(place, 0, high);
    else if (["Escape", "Delete", "Backspace", "0"].includes(event.key)) this.setBrush(place, 0, 1);
    else if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
      const next = place + (event.key === "ArrowRight" ? 1 : -1);
      this.plot.querySelector(`.axis[data-parameter="${next}"]`)?.focus();
    } else return;
    event.preventDefault();
  }

  /** The axis at a position, where there is one. */
  axisAt(x) {
    for (let place = 0; place < this.count; place += 1) if (Math.abs(x - this.x(place)) <= 16) return place;
    return null;
  }

  share(y) {
    return Math.max(0, Math.min(1, (this.y(0) - y) / (this.y(0) - this.y(1))));
  }

  onDown(event) {
    if (!this.plot || event.button !== 0) return;
    const [x, y] = this.position(event);
    const place = this.axisAt(x);
    if (place === null || y < this.y(1) - 10 || y > this.y(0) + 10) return;
    this.drag = { place, from: this.share(y), moved: false };
    this.holder.setPointerCapture(event.pointerId);
    event.preventDefault();
    this.plot.querySelector(`.axis[data-parameter="${place}"]`).focus({ preventScroll: true });
  }

  onMove(event) {
    if (!this.drag) {
      super.onMove(event);
      return;
    }
    const share = this.share(this.position(event)[1]);
    if (Math.abs(share - this.drag.from) > 0.015) this.drag.moved = true;
    if (this.drag.moved) this.setBrush(this.drag.place, this.drag.from, share);
  }

  onUp() {
    if (this.drag && !this.drag.moved) this.setBrush(this.drag.place, 0, 1); // a click on an axis clears its brush
    this.dragged = this.drag !== null;
    this.drag = null;
  }

  onClick(event) {
    if (!this.dragged) super.onClick(event);
    this.dragged = false;
  }

  nearest(x, y) {
    let found = null;
    let smallest = 12;
    const left = this.x(0);
    const step = this.count > 1 ? (this.x(this.count - 1) - left) / (this.count - 1) : 1;
    const from = Math.max(0, Math.min(this.count - 2, Math.floor((x - left) / step)));
    const share = Math.max(0, Math.min(1, (x - left - from * step) / step));
    for (const [trial, shares] of this.points) {
      if (shares[from + 1] === null || !isInside(trial)) continue;
      const distance = Math.abs(this.y(shares[from] + share * (shares[from + 1] - shares[from])) - y);
      if (distance <= smallest) [found, smallest] = [trial, distance];
    }
    return found;
  }

  spot(trial) {
    return [this.x(0), this.y(this.points.get(trial)[0])];
  }

  readingOrder() {
    return sweep.ranked.filter(isInside);
  }

  refresh() {
    if (this.plot) this.paintBrushes();
  }
}

function round(value) {
  return Math.round(value * 10) / 10;
}

/** Show what the brushes leave: in all charts, in the count, and in the table when they rest. */
function brushesChanged() {
  const inside = new Set(sweep.trials.filter(isInside).map((trial) => trial.number));
  for (const each of document.querySelectorAll("#slices .mark[data-trial], #parallel .line[data-trial]")) {
    const isOutside = !inside.has(Number(each.dataset.trial));
    if (each.classList.contains("outside") !== isOutside) each.classList.toggle("outside", isOutside);
  }
  for (const chart of charts.values()) chart.refresh?.();
  showBrushCount(inside.size);
  clearTimeout(brushTimer);
  brushTimer = setTimeout(drawTrials, BRUSH_REST_MS);
}

function showBrushCount(inside) {
  byId("brush-count").textContent = sweep.brushes.size ? `${integer(inside)} of ${plural(sweep.trials.length, "trial")}` : "";
  byId("brush-clear").hidden = sweep.brushes.size === 0;
}

function drawParallel() {
  const section = byId("parallel");
  removeCharts(section);
  if (drawn().length < 2) {
    section.replaceChildren();
    return;
  }
  const holder = element("div", {
    class: "trial-chart", tabindex: 0, role: "group", "aria-roledescription": "chart", "data-chart": "parallel",
    "aria-label": "Parallel coordinates. Arrow keys move from the best trial to the worst; Tab moves to the axes.",
    style: { "min-height": "380px" },
  });
  const clear = element("button", { type: "button", id: "brush-clear", class: "quiet", hidden: true, onclick: () => {
    sweep.brushes.clear();
    brushesChanged();
    holder.focus({ preventScroll: true });
  } }, "Clear brushes");
  section.replaceChildren(
    element("div", { class: "bar" },
      element("div", {}, ...heading("parallel", "Parallel coordinates")),
      element("div", { class: "controls" }, element("span", { id: "brush-count", role: "status" }), clear)),
    element("p", { class: "lead" }, "A line per trial, the best one bold; dashed: pruned, dotted: failed. Drag along an axis to keep only the trials that "
      + "pass there; click the axis to keep all. With the keyboard: Tab to an axis, up and down move the lower end, with Shift the upper end, "
      + "Escape clears, left and right change the axis."),
    element("div", { class: "card" }, element("div", { class: "scroll" }, holder)));
  new ParallelChart(holder);
}
