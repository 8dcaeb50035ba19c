"use strict";
// The page: the highlight of an arm, values of points, light and dark, print.

const root = document.documentElement;

const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

// The highlight

const dimmed = document.head.appendChild(document.createElement("style"));
let pinned = null,
  pointed = null,
  highlighted = null;

function highlight() {
  const arm = pointed ?? pinned;
  if (arm === highlighted) return;
  highlighted = arm;
  const other = `[data-a]:not([data-a="${arm}"])`;
  dimmed.textContent =
    arm === null
      ? ""
      : `.s${other}{opacity:.1}tr${other}{opacity:.35}.arm${other}:not(tr .arm){opacity:.4}` +
        `path.f[data-a="${arm}"]{opacity:.6}tr[data-a="${arm}"] td{background:var(--glow)}`;
}
function point(arm) {
  pointed = arm;
  highlight();
}
function pin(arm) {
  pinned = arm === pinned ? null : arm;
  for (const button of document.querySelectorAll("button.arm")) {
    button.setAttribute("aria-pressed", String(button.dataset.a === pinned));
  }
  highlight();
}
const armOf = (element) => element.closest?.("[data-a]")?.dataset.a ?? null;
document.addEventListener("pointerover", (event) => {
  if (!event.target.closest?.(".drawing")) point(armOf(event.target));
});
document.addEventListener("focusin", (event) => {
  if (event.target.matches(":focus-visible")) point(armOf(event.target));
});
document.addEventListener("focusout", () => {
  point(null);
  hideTip();
});
document.addEventListener("click", (event) => {
  const button = event.target.closest("button.arm");
  if (button) pin(button.dataset.a);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  hideTip();
  pinned = null;
  pin(null);
  point(null);
});

// Values of points

const tip = document.getElementById("tip");
const halo = document.createElementNS("http://www.w3.org/2000/svg", "circle");
halo.setAttribute("class", "halo");
halo.setAttribute("r", 13);

function hideTip() {
  tip.hidden = true;
  halo.remove();
}

function showTip(plot, found) {
  const { series, index } = found;
  const exact = index >= 0 && (series.x || series.y);
  const value = (axis, labels, place, list) => {
    const number = exact ? list[index] : axis.value(place);
    if (labels.length) return escaped(labels[Math.round(number)] ?? "");
    return exact
      ? textOf("number", number)
      : `≈ ${textOf("number", Number(number.toPrecision(3)))}`;
  };
  const arm = ARMS[series.a];
  const names = (series.t || []).length === 1 ? series.t[0] : (series.t || [])[index];
  const trial = series.r ? undefined : typeof names === "number" ? trialName(plot, names) : names;
  const lines = [];
  if (arm !== undefined)
    lines.push(`<span class="arm">${keyOf(series.a)}<b>${escaped(arm)}</b></span>`);
  const label = series.l && arm !== undefined ? series.l.replace(`${arm}, `, "") : series.l;
  if (label) lines.push(arm === undefined ? `<b>${escaped(label)}</b>` : escaped(label));
  if (trial !== undefined) lines.push(`<span class="dim">${escaped(trial)}</span>`);
  const rows = [];
  if (series.k !== "rule" || !series.y) {
    rows.push([plot.data.x, value(plot.x, plot.data.xl, found.x, series.x)]);
  }
  if (series.k === "interval") {
    rows.push([
      plot.data.y,
      `${textOf("number", series.y[index])} to ${textOf("number", series.h[index])}`,
    ]);
  } else if (series.k !== "rule" || series.y) {
    rows.push([plot.data.y, value(plot.y, plot.data.yl, found.y, series.now || series.y)]);
  }
  for (const [title, text] of rows)
    lines.push(`<span class="dim">${escaped(title)}</span>&ensp;${text}`);
  tip.innerHTML = lines.map((line) => `<div>${line}</div>`).join("");
  tip.hidden = false;
  halo.setAttribute("cx", found.x);
  halo.setAttribute("cy", found.y);
  plot.svg.append(halo);
  const box = plot.svg.getBoundingClientRect(),
    unit = box.width / plot.svg.viewBox.baseVal.width;
  const x = box.left + found.x * unit,
    y = box.top + found.y * unit;
  const left = x + 16 + tip.offsetWidth > innerWidth ? x - 16 - tip.offsetWidth : x + 16;
  const top = Math.min(Math.max(4, y - tip.offsetHeight - 10), innerHeight - tip.offsetHeight - 4);
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${top}px`;
}

function listen(plot) {
  const { svg } = plot;
  const find = (event) => {
    const box = svg.getBoundingClientRect(),
      unit = svg.viewBox.baseVal.width / box.width;
    return plot.nearest(
      (event.clientX - box.left) * unit,
      (event.clientY - box.top) * unit,
      18 * unit,
    );
  };
  svg.addEventListener("pointermove", (event) => {
    const found = find(event);
    if (!found) {
      hideTip();
      point(null);
      return;
    }
    showTip(plot, found);
    point(found.series.a === undefined ? null : String(found.series.a));
  });
  svg.addEventListener("pointerleave", () => {
    hideTip();
    point(null);
  });
  svg.addEventListener("click", (event) => {
    const found = find(event);
    if (found && found.series.a !== undefined) pin(String(found.series.a));
  });
  svg.addEventListener("keydown", (event) => {
    const series = event.target.series,
      step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!series || !step) return;
    event.preventDefault();
    const points =
      series.k === "rule"
        ? []
        : plot
            .places(series)
            .flat()
            .sort((a, b) => a[0] - b[0]);
    if (!points.length) return;
    series.focused = Math.min(points.length - 1, Math.max(0, (series.focused ?? -1) + step));
    const [x, y, index] = points[series.focused];
    showTip(plot, { series, x, y, index });
  });
}

function offerScale(plot) {
  if (plot.data.yl.length || (!plot.given.log && !(plot.least() > 0 && plot.given.high > 0)))
    return;
  const place = document.createElement("div");
  place.className = "scale";
  place.innerHTML = '<button type="button"></button>';
  const button = place.firstChild;
  const say = () => {
    button.textContent = plot.y.log ? "linear scale" : "log scale";
  };
  button.addEventListener("click", () => {
    hideTip();
    plot.rescale(!plot.y.log);
    say();
  });
  say();
  plot.figure.querySelector(".drawing").append(place);
}

// Start

const ARMS = JSON.parse(document.getElementById("arms").textContent);
const PLOTS = [...document.querySelectorAll("figure[id]")].map((figure) => {
  const plot = new Plot(figure);
  // A title would show up as the browser's own tooltip all over the figure.
  const title = plot.svg.querySelector("title");
  plot.svg.setAttribute("aria-label", title.textContent);
  plot.svg.setAttribute("aria-describedby", plot.svg.querySelector("desc").id);
  plot.svg.removeAttribute("aria-labelledby");
  title.remove();
  listen(plot);
  offerScale(plot);
  return plot;
});
const TRIALS = [...document.querySelectorAll(".trials")].map(
  (place, i) => new TrialTable(place, i, PLOTS),
);
const trialName = (plot, row) => {
  const table = TRIALS[Number(plot.figure.closest(".block").dataset.trials)];
  return table ? table.cell(row, table.data.trial) : undefined;
};
readHash(TRIALS);

const theme = document.getElementById("theme");
const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
const sayTheme = () => {
  theme.textContent = isDark() ? "Light" : "Dark";
};
try {
  const kept = localStorage.getItem("lockstep-theme");
  if (kept === "light" || kept === "dark") root.dataset.theme = kept;
} catch {
  /* A page from a file may have no storage. */
}
theme.hidden = false;
theme.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  try {
    localStorage.setItem("lockstep-theme", root.dataset.theme);
  } catch {
    /* As above. */
  }
  sayTheme();
});
dark.addEventListener("change", sayTheme);
sayTheme();

for (const text of document.querySelectorAll(".copied")) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "small";
  button.textContent = "Copy";
  button.addEventListener("click", () =>
    copy([...text.querySelectorAll("p")].map((p) => p.textContent).join("\n\n"), button),
  );
  text.append(button);
}

// What a table shows, as CSV (RFC 4180); spreadsheets do not compute a text behind an apostrophe.
function csvOf(table) {
  const field = (cell) => {
    const text = cell.textContent.replace(/^(?=[=+@]|-(?![\d.]))/, "'");
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const rows = [...table.rows].map((row) => [...row.cells].map(field).join(","));
  return rows.join("\r\n") + "\r\n";
}
for (const place of document.querySelectorAll(".table")) {
  const table = place.querySelector("table");
  if (!table || table.querySelector("td.none")) continue;
  const onclick = () => {
    const href = `data:text/csv;charset=utf-8,${encodeURIComponent(csvOf(table))}`;
    const name = table.caption.textContent.replace(/\W+/g, "_").slice(0, 60).toLowerCase();
    make("a", { href, download: `${name}.csv` }).click();
  };
  const title = "Save what this table shows";
  place.append(
    make("button", { type: "button", className: "small csv", textContent: "CSV", title, onclick }),
  );
}

const links = new Map(
  [...document.querySelectorAll("aside nav a")].map((a) => [a.hash.slice(1), a]),
);
const seen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const [id, link] of links) link.classList.toggle("here", id === entry.target.id);
    }
  },
  { rootMargin: "-15% 0px -75% 0px" },
);
for (const section of document.querySelectorAll(".panel")) seen.observe(section);

let opened = [];
addEventListener("beforeprint", () => {
  hideTip();
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const each of opened) each.open = true;
  for (const each of TRIALS) each.render(100);
});
addEventListener("afterprint", () => {
  for (const each of opened) each.open = false;
  for (const each of TRIALS) each.render();
});
