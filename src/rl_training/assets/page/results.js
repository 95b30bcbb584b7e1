/* Part 3: the answer first. Final scores with their intervals, beside published ones. */

function drawResults() {
  const section = byId("results");
  const tasks = shownTasks();
  if (state.data.groups.length === 0) {
    section.replaceChildren();
    return;
  }
  section.replaceChildren(
    ...heading("results", "Final scores"),
    ...answers(tasks),
    element("p", { class: "lead" },
      "The score of a run is its last evaluation. Center: interquartile mean (IQM) over seeds; bar: ",
      "95 % stratified bootstrap interval; dots: seeds. ",
      state.data.published.some((curve) => curve.final)
        ? "Diamonds are published means, with one standard deviation over seeds; see their notes."
        : ""),
    ...present([overallResults(), tasks.map(taskResults)]),
  );
  if (tasks.length === 0) section.append(element("p", { class: "muted" }, "No run matches the filters."));
}

/** One sentence per task: which method is best, and whether the intervals say so clearly. */
function answers(tasks) {
  return tasks.slice(0, 6).map((task) => {
    const groups = scored(task);
    if (groups.length === 0) return null;
    const [best, second] = groups;
    const parts = [
      "On ", element("b", {}, taskName(task)), ", ", element("b", {}, label(best.method)),
      ` reaches ${score(best.score.iqm)}`,
      isNumber(best.score.low) ? ` (95 % interval ${interval(best.score.low, best.score.high)})` : "",
    ];
    if (!second) parts.push(` with ${plural(best.score.seeds, "seed")}.`);
    else if (best.score.step !== second.score.step) {
      parts.push(` after ${integer(best.score.step)} steps, ${label(second.method)} ${score(second.score.iqm)} after ${integer(second.score.step)}.`);
    } else if (!isNumber(best.score.low) || !isNumber(second.score.high)) {
      parts.push(`, ${label(second.method)} ${score(second.score.iqm)}; one seed tells nothing about the spread.`);
    } else {
      const clear = best.score.low > second.score.high;
      parts.push(`, ${label(second.method)} ${score(second.score.iqm)}; their intervals `, clear ? "do not overlap." : "overlap.");
    }
    return element("p", { class: "answer" }, parts);
  }).filter((answer) => answer !== null);
}

function scored(task) {
  return shownGroups()
    .filter((group) => group.task === task && group.score)
    .sort((first, second) => second.score.iqm - first.score.iqm);
}

function taskResults(task) {
  const groups = scored(task);
  const missing = shownGroups().filter((group) => group.task === task && !group.score);
  const published = shownPublished(task).filter((curve) => curve.final);
  const [low, high] = stripRange(groups, published);
  const at = (value) => `${Math.max(0, Math.min(100, (100 * (value - low)) / (high - low)))}%`;
  const marks = ticks(low, high, 5);
  const rows = [
    ...groups.map((group, order) => groupRow(group, order === 0 && groups.length > 1, at, marks)),
    ...published.map((curve) => publishedRow(curve, at, marks)),
    ...missing.map((group) => element("tr", { "data-group": group.index },
      element("td", { class: "method" }, methodSwatch(group.method), label(group.method)),
      element("td", { class: "muted", colspan: 6 }, "no evaluation yet"))),
  ];
  const notes = [...groups, ...missing].flatMap((group) => group.notes.map((note) => `${label(group.method)}: ${note}`));
  for (const note of new Set(published.map((curve) => curve.note))) notes.push(note);
  const late = shownPublished(task).filter((curve) => !curve.final);
  if (late.length) notes.push(`published curves begin at step ${integer(Math.min(...late.map((curve) => curve.steps[0])))}`);
  return element("div", { class: "card task-results", "data-task": taskName(task) },
    element("header", {}, element("h3", {}, taskName(task))),
    element("div", { class: "scroll" }, element("table", { class: "results-table" },
      element("thead", {}, element("tr", {},
        header("Algorithm"), header("IQM", true), header("95 % interval", true), header("Mean", true),
        header("Median", true), header("Seeds", true), header("Steps", true), header("Mean evaluation return"))),
      element("tbody", {}, rows),
      element("tfoot", {}, element("tr", {},
        element("td", { colspan: 7 }),
        element("td", { class: "plot" }, element("div", { class: "scale" },
          marks.map((mark) => element("span", { style: { left: at(mark) } }, short(mark))))))))),
    notes.length ? element("p", { class: "about" }, notes.join(" · ")) : null);
}

function header(text, number = false) {
  return element("th", { scope: "col", class: number ? "number" : null }, text);
}

function cell(text, name, more = "") {
  return element("td", { class: `number ${more}`, "data-label": name }, text);
}

function stripRange(groups, published) {
  const all = groups.flatMap((group) => [
    group.score.low, group.score.high, group.score.iqm, ...group.score.values.map((each) => each.value),
  ]);
  for (const { final } of published) all.push(final.mean - final.deviation, final.mean + final.deviation);
  const [low, high] = bounds(all) ?? [0, 1];
  const room = (high - low) * 0.04 || Math.abs(low) * 0.1 || 1;
  return [low - room, high + room];
}

function groupRow(group, best, at, marks) {
  const { score: result, method } = group;
  const color = `var(--m${method % COLORS})`;
  return element("tr", { class: best ? "best" : null, "data-group": group.index },
    element("td", { class: "method" }, methodSwatch(method), label(method)),
    cell(score(result.iqm), "IQM", "score"),
    cell(interval(result.low, result.high), "95 %"),
    cell(score(result.mean), "mean"),
    cell(score(result.median), "median"),
    cell(integer(result.seeds), "seeds"),
    cell(integer(result.step), "steps"),
    element("td", { class: "plot" }, scoreStrip(result, result.iqm, color, at, marks)));
}

/** The center, the interval and the seeds of a score, beside those of other scores. */
function scoreStrip(result, center, color, at, marks) {
  const strip = element("div", {
    class: "strip", role: "img",
    "aria-label": `${score(center)}, interval ${interval(result.low, result.high)}`,
  }, gridMarks(marks, at));
  if (isNumber(result.low)) strip.append(element("span", { class: "whisker", style: {
    left: at(result.low), width: `calc(${at(result.high)} - ${at(result.low)})`, background: color,
  } }));
  for (const each of result.values) strip.append(element("span", {
    class: "seed", style: { left: at(each.value), background: color },
    title: `seed ${each.seed ?? "?"}: ${score(each.value)}${isNumber(each.step) ? ` at ${integer(each.step)} steps` : ""}`,
  }));
  strip.append(element("span", { class: "center", style: { left: at(center), background: color } }));
  return strip;
}

function publishedRow(curve, at, marks) {
  const { final } = curve;
  const low = final.mean - final.deviation;
  const high = final.mean + final.deviation;
  const strip = element("div", { class: "strip" }, gridMarks(marks, at),
    element("span", { class: "spread", style: {
      left: at(low), width: `calc(${at(high)} - ${at(low)})`, background: "var(--published)",
    } }),
    element("span", { class: "diamond", style: { left: at(final.mean) } }));
  return element("tr", { class: "published", "data-published": curve.method },
    element("td", { class: "method", title: curve.source },
      swatch("var(--published)", publishedDash(curve.method), 1.6), `${curve.method}, published`),
    cell("", ""),
    cell(`± ${score(final.deviation)}`, "spread"),
    cell(score(final.mean), "mean"),
    cell("", ""),
    cell(integer(curve.seeds), "seeds"),
    cell(integer(final.step), "steps"),
    element("td", { class: "plot" }, strip));
}

function gridMarks(marks, at) {
  return marks.map((mark) => element("span", { class: "tick", style: { left: at(mark) } }));
}

/** Scores over all tasks, normalized so that tasks can be averaged. */
function overallResults() {
  const { overall } = state.data;
  if (!overall || state.task !== "" || state.text !== "") return null;
  const rows = overall.rows.filter(({ method }) => state.algorithm === ""
    || state.data.methods[method].algorithm === state.algorithm);
  const panels = [["iqm", "IQM", "higher is better"], ["mean", "Mean", "higher is better"],
    ["median", "Median", "higher is better"], ["optimality_gap", "Optimality gap", "lower is better"]];
  return element("div", { class: "card task-results", id: "overall" },
    element("header", {}, element("h3", {}, `Over ${plural(overall.tasks.length, "task")}`)),
    element("p", { class: "about" }, overall.note),
    element("div", { class: "grid tiny" }, panels.map(([key, name, direction]) => {
      const values = rows.flatMap((row) => row[key]);
      const [low, high] = padded(bounds(values) ?? [0, 1]);
      const at = (value) => `${(100 * (value - low)) / (high - low)}%`;
      const marks = ticks(low, high, 4);
      return element("div", {},
        element("p", {}, element("b", {}, name), element("span", { class: "muted" }, ` ${direction}`)),
        rows.map((row) => {
          const color = `var(--m${row.method % COLORS})`;
          const [center, from, to] = row[key];
          return element("div", {},
            element("div", { class: "about" }, methodSwatch(row.method), ` ${label(row.method)}: `,
              element("b", {}, score(center)), ` (${interval(from, to)})`),
            element("div", { class: "strip" }, gridMarks(marks, at),
              element("span", { class: "whisker", style: {
                left: at(from), width: `calc(${at(to)} - ${at(from)})`, background: color } }),
              element("span", { class: "center", style: { left: at(center), background: color } })));
        }),
        element("div", { class: "scale" },
          marks.map((mark) => element("span", { style: { left: at(mark) } }, trim(mark)))));
    })));
}

function padded([low, high]) {
  const room = (high - low) * 0.06 || Math.abs(low) * 0.1 || 1;
  return [low - room, high + room];
}
