/* Part 10, of a sweep only: slices and parallel coordinates, drawn as SVG.
 *
 * Finished trials are blue, the better the stronger; the best one is orange and larger. Pruned trials
 * are crosses and dashed lines, failed ones triangles and dotted lines: nothing is told by color alone.
 */

const MANY_TRIALS = 300;

/** Where values are between the ends of an axis, from 0 to 1, and which of them are named. */
function parameterScale(parameter, count) {
  if (parameter.scale === "choice") {
    const { length } = parameter.values;
    const every = Math.ceil(length / Math.max(1, 2 * count));
    return {
      at: (value) => (value + 0.5) / length,
      ticks: parameter.values.map((text, place) => ({ at: (place + 0.5) / length, text })).filter((_, place) => place % every === 0),
    };
  }
  const { low, high, whole } = parameter;
  const isLog = parameter.scale === "log";
  const at = isLog ? (value) => Math.log(value / low) / Math.log(high / low) : (value) => (value - low) / (high - low);
  let named = isLog ? logTicks(low, high, count) : ticks(low, high, count);
  if (whole && !isLog && high - low <= 2 * count) named = Array.from({ length: high - low + 1 }, (_, place) => low + place);
  return { at, ticks: named.map((value) => ({ at: at(value), text: parameterText(parameter, value) })) };
}

function logTicks(low, high, count) {
  for (const steps of [[1, 2, 5], [1, 3], [1]]) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
      for (const step of steps) {
        const value = Number((step * 10 ** power).toPrecision(3));
        if (value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9)) found.push(value);
      }
    }
    if (found.length <= count + 1 && found.length > 1) return found;
    if (steps.length === 1 && found.length > 1) {
      return found.filter((_, place) => place % Math.ceil(found.length / count) === 0);
    }
  }
  return [low, high];
}

function objectiveScale(count) {
  const [low, high] = objectiveEnds();
  const at = (value) => Math.max(0, Math.min(1, (value - low) / (high - low)));
  return { at, ticks: ticks(low, high, count).map((value) => ({ at: at(value), text: short(value) })) };
}

/** The range of finished trials. Pruned ones may be far outside: they were stopped early. */
function objectiveEnds() {
  const shown = sweep.ranked.length > 1 ? sweep.ranked : sweep.trials;
  return padded(bounds(shown.map((trial) => trial.value)) ?? [0, 1]);
}

/** How strongly a trial is drawn. */
function strength(trial) {
  if (trial.rank === undefined) return 0.55;
  const weakest = [[50, 0.35], [MANY_TRIALS, 0.2], [Infinity, 0.08]].find(([most]) => sweep.trials.length <= most)[1];
  return weakest + (0.95 - weakest) * Math.exp(-trial.rank / Math.min(20, sweep.ranked.length / 4));
}

function trialClass(trial) {
  return [trial.state, trial.rank === 0 ? "top" : "", isInside(trial) ? "" : "outside"].join(" ").trim();
}

/** The weakest first, so that the best trial is drawn above all others. */
function drawingOrder(trials) {
  return [...trials].sort((first, second) => (second.rank ?? Infinity) - (first.rank ?? Infinity) || first.number - second.number);
}

function drawn() {
  return sweep.trials.filter((trial) => ["finished", "pruned"].includes(trial.state) ? isNumber(trial.value) : trial.state === "failed");
}

/** An SVG chart of trials: drawn when seen and when its width changes; arrow keys read its trials. */
class TrialChart {
  constructor(holder, height) {
    this.holder = holder;
    this.height = height;
    this.plot = null;
    this.place = null; // of the trial that the keys have reached
    charts.set(holder, this);
    holder.addEventListener("pointermove", (event) => this.onMove(event));
    holder.addEventListener("pointerleave", () => this.leave());
    holder.addEventListener("click", (event) => this.onClick(event));
    holder.addEventListener("keydown", (event) => this.onKey(event));
    holder.addEventListener("focusout", () => this.leave());
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(holder);
    whenSeen(holder, () => this.draw());
  }

  width() {
    return Math.max(this.smallest ?? 220, Math.floor(this.holder.clientWidth || 400));
  }

  draw() {
    this.drawnWidth = this.width();
    this.plot = svg("svg", {
      viewBox: `0 0 ${this.drawnWidth} ${this.height}`, width: this.drawnWidth, height: this.height,
    });
    this.paint(this.plot);
    this.holder.replaceChildren(this.plot);
    markChosen(this.holder);
  }

  resize() {
    if (this.plot && this.holder.clientWidth && this.width() !== this.drawnWidth) this.draw();
  }

  remove() {
    this.observer.disconnect();
    charts.delete(this.holder);
    seen?.unobserve(this.holder);
  }

  /** The position of an event in the chart. */
  position(event) {
    const box = this.plot.getBoundingClientRect();
    const share = this.drawnWidth / box.width;
    return [(event.clientX - box.left) * share, (event.clientY - box.top) * share];
  }

  onMove(event) {
    if (!this.plot) return;
    this.point(this.nearest(...this.position(event)), event.clientX, event.clientY);
  }

  onClick(event) {
    if (!this.plot) return;
    const found = this.nearest(...this.position(event));
    if (found) choose(found.number);
  }

  point(trial, x, y) {
    for (const each of this.holder.querySelectorAll(".pointed")) each.classList.remove("pointed");
    if (!trial) {
      if (tooltipOwner === this) hideTooltip();
      return;
    }
    this.holder.querySelector(`[data-trial="${trial.number}"]`)?.classList.add("pointed");
    showTooltip(this, trialReadout(trial), x, y);
  }

  onKey(event) {
    drawWaiting(this.holder);
    if (!this.plot || event.ctrlKey || event.metaKey || event.altKey || event.target !== this.holder) return;
    const trials = this.readingOrder();
    const moves = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -trials.length, End: trials.length };
    if (event.key in moves && trials.length) {
      const from = this.place ?? (moves[event.key] > 0 ? -1 : trials.length);
      this.place = Math.max(0, Math.min(trials.length - 1, from + moves[event.key]));
      const [x, y] = this.spot(trials[this.place]);
      const box = this.plot.getBoundingClientRect();
      const share = box.width / this.drawnWidth;
      this.point(trials[this.place], box.left + x * share, box.top + y * share);
    } else if ((event.key === "Enter" || event.key === " ") && this.place !== null) choose(trials[this.place].number);
    else if (event.key === "Escape") this.leave();
    else return;
    event.preventDefault();
  }

  leave() {
    this.place = null;
    this.point(null);
  }
}

/* Slices: the objective over one parameter */

class SliceChart extends TrialChart {
  constructor(holder, parameter) {
    super(holder, 240);
    this.parameter = sweep.data.parameters[parameter];
    this.index = parameter;
  }

  paint(plot) {
    const area = { left: 56, right: this.drawnWidth - 10, top: 10, bottom: this.height - 34 };
    const x = parameterScale(this.parameter, Math.max(2, Math.floor((area.right - area.left) / 70)));
    const y = objectiveScale(4);
    const inset = this.parameter.scale === "choice" ? 0 : 8;
    const across = (share) => area.left + inset + share * (area.right - area.left - 2 * inset);
    const bottom = area.bottom - (drawn().some((trial) => trial.rank === undefined) ? 24 : 0); // below: pruned and failed
    const up = (share) => bottom - share * (bottom - area.top);
    for (const tick of y.ticks) plot.append(
      svg("line", { class: "grid-line", x1: area.left, x2: area.right, y1: up(tick.at), y2: up(tick.at) }),
      svg("text", { class: "tick-text", x: area.left - 7, y: up(tick.at) + 4, "text-anchor": "end" }, tick.text));
    const room = this.parameter.scale === "choice" ? (area.right - area.left) / x.ticks.length : 90;
    for (const tick of x.ticks) plot.append(
      svg("line", { class: "grid-line", x1: across(tick.at), x2: across(tick.at), y1: area.top, y2: area.bottom }),
      svg("text", { class: "tick-text", x: across(tick.at), y: area.bottom + 18, "text-anchor": "middle" },
        fitted(tick.text, room), svg("title", {}, tick.text)));
    this.spots = new Map(drawn().map((trial) => [trial, [
      across(x.at(trial.at[this.index])) + this.spread(trial, (area.right - area.left) / (x.ticks.length * 5)),
      trial.state === "failed" ? area.bottom - 6 : trial.state === "pruned" && y.at(trial.value) <= 0 ? area.bottom - 18 : up(y.at(trial.value)),
    ]]));
    for (const trial of drawingOrder(this.spots.keys())) plot.append(trialMark(trial, ...this.spots.get(trial)));
    if (this.parameter.scale === "choice") this.paintMedians(plot, across, (value) => up(y.at(value)));
  }

  /** Trials with the same choice stand beside each other. */
  spread(trial, width) {
    return this.parameter.scale === "choice" ? (((trial.number * 0.618034) % 1) - 0.5) * 2 * width : 0;
  }

  paintMedians(plot, across, up) {
    const { length } = this.parameter.values;
    for (let place = 0; place < length; place += 1) {
      const values = sweep.ranked.filter((trial) => trial.at[this.index] === place).map((trial) => trial.value);
      if (values.length < 2) continue;
      const half = (across(1 / length) - across(0)) * 0.3;
      const at = up((values[Math.floor((values.length - 1) / 2)] + values[Math.ceil((values.length - 1) / 2)]) / 2);
      const middle = across((place + 0.5) / length);
      plot.append(svg("line", { class: "median", x1: middle - half, x2: middle + half, y1: at, y2: at }));
    }
  }

  spot(trial) {
    return this.spots.get(trial);
  }

  readingOrder() {
    return [...this.spots.keys()].filter(isInside).sort((first, second) => this.spots.get(first)[0] - this.spots.get(second)[0]);
  }

  nearest(x, y) {
    let found = null;
    let smallest = 18 ** 2;
    for (const [trial, [left, top]] of this.spots) {
      const distance = (left - x) ** 2 + (top - y) ** 2;
      if (distance <= smallest && isInside(trial)) [found, smallest] = [trial, distance];
    }
    return found;
  }
}

function fitted(text, width) {
  const most = Math.max(3, Math.floor(width / 7));
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

function trialMark(trial, x, y) {
  const size = sweep.trials.length > MANY_TRIALS ? 3 : 4;
  const shapes = {
    pruned: `M${x - size} ${y - size}L${x + size} ${y + size}M${x - size} ${y + size}L${x + size} ${y - size}`,
    failed: `M${x - size} ${y - size}L${x + size} ${y - size}L${x} ${y + size}Z`,
  };
  const shared = { class: `mark ${trialClass(trial)}`, "data-trial": trial.number, "fill-opacity": trial.rank === 0 ? 1 : strength(trial) };
  if (trial.state in shapes) return svg("path", { ...shared, d: shapes[trial.state] });
  return svg("circle", { ...shared, cx: x, cy: y, r: trial.rank === 0 ? size + 2.5 : size });
}

function drawSlices() {
  const section = byId("slices");
  removeCharts(section);
  if (drawn().length === 0) {
    section.replaceChildren();
    return;
  }
  const several = sweep.data.parameters.length > 1;
  section.replaceChildren(
    ...heading("slices", "Slices", `The ${objectiveName()}, over ${several ? "each parameter. The others vary too, so a slice alone proves no effect" : "the parameter"}. `
      + "With the keyboard: Tab, arrow keys, Enter to mark a trial everywhere, Escape."),
    markKeys(),
    element("div", { class: ["grid single", "grid"][sweep.data.parameters.length - 1] ?? "grid small" }, sweep.data.parameters.map(sliceCard)));
}

function markKeys() {
  const states = new Set(drawn().map((trial) => trial.state));
  const key = (trial, text) => element("span", {}, svg("svg", { class: "marks", width: 16, height: 16, "aria-hidden": "true" }, trialMark(trial, 8, 8)), text);
  const example = (stateName, rank) => ({ number: -1, state: stateName, rank, at: [] });
  return element("div", { class: "keys" },
    sweep.ranked.length ? key(example("finished", 0), "best trial") : null,
    sweep.ranked.length > 1 ? key(example("finished", 1), "finished, the better the stronger") : null,
    states.has("pruned") ? key(example("pruned"), "pruned, at its last value or at the edge") : null,
    states.has("failed") ? key(example("failed"), "failed") : null,
    sweep.data.parameters.some((parameter) => parameter.scale === "choice")
      ? element("span", {}, svg("svg", { class: "marks", width: 22, height: 12, "aria-hidden": "true" },
        svg("line", { class: "median", x1: 1, x2: 21, y1: 6, y2: 6 })), "median of the finished trials") : null);
}

function sliceCard(parameter, place) {
  const holder = element("div", {
    class: "trial-chart", tabindex: 0, role: "img", "aria-roledescription": "chart", "data-chart": "slice", "data-parameter": place,
    "aria-label": `Objective over ${parameter.key}, ${plural(drawn().length, "trial")}. Arrow keys move from trial to trial, Enter marks one everywhere.`,
    style: { "min-height": "240px" },
  });
  new SliceChart(holder, place);
  const about = parameter.scale === "log" ? "log scale" : "";
  return element("div", { class: "card" },
    element("header", {}, element("h3", { title: parameter.key }, parameterName(place)), element("span", { class: "about" }, about)), holder);
}
