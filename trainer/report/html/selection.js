"use strict";
// What a selection of trials changes: figures that describe, panels that test, and the address.

/** Draws again the figures that show trials of a table, and marks the panels that test. */
function describe(table) {
  const out = (t) => typeof t === "number" && !table.selected[t];
  for (const plot of table.plots) {
    note(table, plot);
    const again = new Set(plot.series.filter((s) => s.r).map((s) => s.a));
    for (const series of plot.series) {
      if (series.r === "best_of_k") {
        series.now = table.active ? bestOfK(goalsOf(table, series), table.data.better) : null;
        plot.draw(series);
      } else if (series.k === "band" && again.has(series.a)) {
        series.element.style.display = table.active ? "none" : "";
      } else if (series.t?.length === 1 && series.line) {
        const hidden = out(series.t[0]);
        if (hidden !== Boolean(series.hidden)) {
          series.hidden = hidden;
          series.element.style.display = hidden ? "none" : "";
        }
      } else if (series.t?.some((t) => typeof t === "number")) {
        series.left = table.active ? (i) => out(series.t[i]) : null;
        plot.draw(series);
      }
    }
  }
  markStale(TRIALS);
}

/** Says below a figure of trials how many it shows. */
function note(table, plot) {
  if (!plot.series.some((s) => s.t?.some((t) => typeof t === "number"))) return;
  if (!plot.part) {
    plot.part = make("p", { className: "part" });
    plot.figure.querySelector(".drawing").after(plot.part);
  }
  plot.part.hidden = !table.active;
  plot.part.textContent = `Drawn of ${table.visible.length} of ${table.size} trials. Means of compared runs, the description and the table are of all.`;
}

/** Returns the goals of the selected trials of a series, several seeds of a point as their mean. */
function goalsOf(table, series) {
  const groups = new Map(),
    seeds = series.t.length > series.x.length;
  for (const row of series.t) {
    if (typeof row !== "number") continue;
    const key = seeds ? table.data.axes.map((j) => table.cell(row, j)).join("\n") : row;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  }
  return [...groups.values()]
    .filter((rows) => rows.every((row) => table.selected[row]))
    .map((rows) => {
      const goals = rows.map((row) => table.number(row, table.data.goal));
      return goals.includes(null) ? null : goals.reduce((a, b) => a + b, 0) / goals.length;
    });
}

/** Says above panels that test that they are of all trials, while a filter is on. */
function markStale(tables) {
  const active = tables.filter((table) => table.active);
  document.documentElement.classList.toggle("filtered", active.length > 0);
  const what = active
    .map(
      (t) =>
        `${t.visible.length} of ${t.size} trials${tables.length > 1 ? ` of ${t.data.workload}` : ""}`,
    )
    .join(", ");
  for (const panel of document.querySelectorAll('.panel[data-kind="tests"]')) {
    let note = panel.querySelector(":scope > .stale");
    if (!note) {
      note = make("p", { className: "stale" });
      panel.querySelector("h2").after(note);
    }
    note.hidden = !active.length;
    note.textContent = `A filter is on (${what}). The numbers of this panel are of all trials: a test of a selection that was made after seeing the results would mean nothing.`;
  }
}

// The state in the address

function writeHash(tables) {
  const state = new URLSearchParams();
  tables.forEach((table, i) => {
    const { text, arms, ends, low, high, sort } = table.state,
      name = (j) => table.data.columns[j].name;
    if (text) state.set(`${i}.text`, text);
    if (arms) state.set(`${i}.arm`, JSON.stringify(arms));
    if (ends) state.set(`${i}.end`, JSON.stringify(ends));
    for (const [j, value] of Object.entries(low)) state.set(`${i}.min.${name(j)}`, value);
    for (const [j, value] of Object.entries(high)) state.set(`${i}.max.${name(j)}`, value);
    if (sort[0] !== table.data.goal || sort[1] !== (table.data.better === "min" ? 1 : -1))
      state.set(`${i}.sort`, `${sort[1] > 0 ? "" : "-"}${name(sort[0])}`);
  });
  const hash = state.toString();
  if (!hash && !location.hash.startsWith("#trials?")) return;
  try {
    history.replaceState(null, "", hash ? `#trials?${hash}` : "#panel-trials");
  } catch {
    /* Some browsers allow it from no file. */
  }
}

function readHash(tables) {
  if (!location.hash.startsWith("#trials?")) return;
  const state = new URLSearchParams(location.hash.slice(8));
  const list = (text) => {
    try {
      const names = JSON.parse(text);
      return Array.isArray(names) ? names : null;
    } catch {
      return null;
    }
  };
  tables.forEach((table, i) => {
    if (!table.size) return;
    const find = (name) => table.data.columns.findIndex((c) => c.name === name);
    for (const [key, value] of state) {
      if (!key.startsWith(`${i}.`)) continue;
      const [, kind, ...rest] = key.split("."),
        column = find(rest.join("."));
      if (kind === "text") table.state.text = value;
      else if (kind === "arm") table.state.arms = list(value);
      else if (kind === "end") table.state.ends = list(value);
      else if (kind === "min" && column >= 0 && !Number.isNaN(Number(value)))
        table.state.low[column] = Number(value);
      else if (kind === "max" && column >= 0 && !Number.isNaN(Number(value)))
        table.state.high[column] = Number(value);
      else if (kind === "sort" && find(value.replace(/^-/, "")) >= 0)
        table.state.sort = [find(value.replace(/^-/, "")), value.startsWith("-") ? -1 : 1];
    }
    table.fill();
    table.apply();
  });
  document.getElementById("panel-trials")?.scrollIntoView();
}
