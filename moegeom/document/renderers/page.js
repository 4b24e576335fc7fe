"use strict";
// What a page does beyond being read: it picks a layer, sorts and filters tables, copies commands.
// It requests nothing and stores nothing; without it everything is still on the page.
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const make = (tag, text, facts = {}) =>
    Object.assign(document.createElement(tag), { textContent: text, ...facts });
  const { compare } = new Intl.Collator("en", { numeric: true });

  // ------------------------------------------------------------------------------------- layers
  const ofLayers = all("[data-layer]");
  const layers = [...new Set(ofLayers.map((one) => one.dataset.layer))].sort(compare);
  const picker = make("select", "", { id: "layer" });

  function pick(layer) {
    picker.value = layer;
    for (const one of ofLayers) one.hidden = layer !== "" && one.dataset.layer !== layer;
    for (const figure of all("figure")) {
      const panels = all("[data-layer]", figure);
      figure.classList.toggle("bare", panels.length > 0 && panels.every((panel) => panel.hidden));
      for (const rest of all("details", figure)) {
        rest.open = layer !== "" && all("[data-layer]", rest).some((panel) => !panel.hidden);
      }
    }
    for (const map of all("[data-links]")) outline(map, layer);
  }

  const targets = (map) => map.dataset.links.split(" ").map((link) => document.querySelector(link));

  // The row of the picked layer in a map of all layers.
  function outline(map, layer) {
    map.parentNode.querySelector(".picked")?.remove();
    const rows = targets(map);
    const row = rows.findIndex((target) => layer !== "" && target?.dataset.layer === layer);
    if (row < 0) return;
    const mark = map.cloneNode();
    const height = map.getAttribute("height") / rows.length;
    mark.removeAttribute("data-links");
    mark.setAttribute("class", "picked");
    mark.setAttribute("height", height);
    mark.setAttribute("y", Number(map.getAttribute("y")) + row * height);
    map.parentNode.append(mark);
  }

  function reveal(target) {
    if (target.hidden) pick(target.dataset.layer ?? "");
    for (let fold = target.closest("details"); fold; fold = fold.parentNode.closest("details")) {
      fold.open = true;
    }
    target.scrollIntoView({ block: "center" });
  }

  for (const map of all("[data-links]")) {
    map.parentNode.addEventListener("click", (event) => {
      const { top, bottom, left, right, height } = map.getBoundingClientRect();
      const [x, y] = [event.clientX, event.clientY];
      if (x < left || x > right || y < top || y >= bottom) return;
      const rows = targets(map);
      const target = rows[Math.floor(((y - top) / height) * rows.length)];
      if (!target) return;
      if (target.dataset.layer !== undefined) pick(target.dataset.layer);
      history.replaceState(null, "", `#${target.id}`);
      reveal(target);
    });
  }
  addEventListener("hashchange", () => {
    const target = document.getElementById(location.hash.slice(1));
    if (target) reveal(target);
  });
  if (layers.length > 1) {
    picker.append(make("option", "all layers", { value: "" }));
    for (const layer of layers) picker.append(make("option", `layer ${layer}`, { value: layer }));
    picker.addEventListener("change", () => pick(picker.value));
    const label = make("label", "Show ", { className: "tools" });
    label.append(picker);
    document.querySelector("h1").after(label);
  }

  // ------------------------------------------------------------------------------------- tables
  const NUMBER = /^[<>~]?\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)/i;
  const text = (row, column) => row.cells[column].textContent.trim();
  const number = (row, column) => Number(text(row, column).replaceAll(",", "").match(NUMBER)?.[1]);
  const isEmpty = (row, column) => ["", "-"].includes(text(row, column));

  // Rows by a column: what is empty last, in any direction.
  function sorted(rows, column, direction) {
    const filled = rows.filter((row) => !isEmpty(row, column));
    const areNumbers = filled.every((row) => !Number.isNaN(number(row, column)));
    const order = areNumbers
      ? (a, b) => number(a, column) - number(b, column)
      : (a, b) => compare(text(a, column), text(b, column));
    filled.sort((a, b) => direction * order(a, b));
    return [...filled, ...rows.filter((row) => isEmpty(row, column))];
  }

  for (const table of all("table")) {
    const body = table.tBodies[0];
    const every = [...body.rows];
    const rows = every.filter((row) => !row.classList.contains("dim"));
    const rest = every.filter((row) => row.classList.contains("dim"));
    // a row without a name goes on with the row before
    if (rows.length < 2 || rows.some((row) => text(row, 0) === "")) continue;
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = make("button", "\u2195", { title: `sort by ${head.textContent.trim()}` });
      button.addEventListener("click", () => {
        const next = { none: "descending", descending: "ascending", ascending: "none" };
        const state = next[head.ariaSort ?? "none"];
        for (const one of heads) one.ariaSort = "none";
        for (const one of all("th button", table)) one.textContent = "\u2195";
        head.ariaSort = state;
        button.textContent = { none: "\u2195", descending: "\u2193", ascending: "\u2191" }[state];
        const direction = state === "descending" ? -1 : 1;
        body.append(...(state === "none" ? every : [...sorted(rows, column, direction), ...rest]));
      });
      head.append(button);
    });
    if (rows.length <= 8) continue;
    const filter = make("input", "", { type: "search", placeholder: "filter rows" });
    filter.ariaLabel = "filter rows";
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase().split(/\s+/);
      for (const row of rows) {
        const content = row.textContent.toLowerCase();
        row.classList.toggle("out", !words.every((word) => content.includes(word)));
      }
    });
    table.parentNode.before(filter);
  }

  // ----------------------------------------------------------------------------------- commands
  for (const code of all("code.typed")) {
    const button = make("button", "copy");
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(code);
        button.textContent = "selected";
      }
      setTimeout(() => (button.textContent = "copy"), 2000);
    });
    code.after(button);
  }
})();
