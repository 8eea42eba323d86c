"use strict";

// Who holds the bytes at a chosen moment of the step, at first its peak: a map by category, module
// and line, and a table.
Memfit.kind("holders", ({ figure, chart, content }) => {
  const { x, total, parts, lives } = content;
  const { names } = lives;
  const MOST_ROWS = 15;
  const MOST_MODULES = 80;
  const MOST_LINES = 12;
  const MANY_ROWS = 60;
  const LONGEST_NAME = 22;
  const peak = total.reduce((best, value, point) => (value > total[best] ? point : best), 0);
  const colours = new Map(parts.map(({ name, colour }) => [name, colour]));
  const table = Memfit.element("div", { class: "scroll alive" });
  let point = peak;

  // What lives there, one row per category, module and line. Blocks that the page leaves out for
  // their smallness are what is missing from the total of their category.
  function rowsAt() {
    const rows = new Map();
    const place = x[point];
    const found = new Map(parts.map(({ name }) => [name, 0]));
    for (let life = 0; life < lives.begin.length; life += 1) {
      if (lives.begin[life] <= place && place < lives.end[life]) {
        const [category, module, line] = [lives.category[life], lives.module[life], lives.line[life]];
        const key = `${category} ${module} ${line}`;
        const row = rows.get(key) || { category: names[category], module: names[module] || "(step)",
          line: names[line], bytes: 0, blocks: 0 };
        row.bytes += lives.bytes[life];
        row.blocks += lives.blocks[life];
        rows.set(key, row);
        found.set(row.category, (found.get(row.category) || 0) + lives.bytes[life]);
      }
    }
    parts.forEach(({ name, values }) => {
      const rest = values[point] - found.get(name);
      if (rest > 0) {
        rows.set(`rest of ${name}`, { category: name, module: "(smaller blocks)", line: "", bytes: rest, blocks: 0 });
      }
    });
    return [...rows.values()].sort((one, two) => two.bytes - one.bytes);
  }

  // Layers that repeat have one name but for their numbers.
  const family = (module) => module.replace(/(^|\.)\d+(?=\.|$)/g, "$1*");

  // Of very many rows, those of repeated layers as one.
  function rowsOfFamilies(rows) {
    const families = new Map();
    rows.forEach((row) => {
      const name = family(row.module);
      const key = JSON.stringify([row.category, name, row.line]);
      const sum = families.get(key) || { ...row, module: name, bytes: 0, blocks: 0, members: new Set() };
      sum.bytes += row.bytes;
      sum.blocks += row.blocks;
      sum.members.add(row.module);
      families.set(key, sum);
    });
    return [...families.values()].sort((one, two) => two.bytes - one.bytes);
  }

  // Nodes by a key, the largest first; past so many the rest is one node.
  function nodes(rows, keyOf, most, childrenOf) {
    const groups = new Map();
    rows.forEach((row) => {
      const key = keyOf(row);
      groups.set(key, groups.get(key) || []);
      groups.get(key).push(row);
    });
    const sized = [...groups].map(([name, members]) => (
      { name, members, value: members.reduce((sum, row) => sum + row.bytes, 0) }));
    sized.sort((one, two) => two.value - one.value);
    const shown = sized.slice(0, most).map(({ name, members, value }) => (
      { name: name || "(line not known)", value, children: childrenOf(members) }));
    const rest = sized.slice(most).reduce((sum, { value }) => sum + value, 0);
    if (rest) {
      shown.push({ name: `(${sized.length - most} others)`, value: rest });
    }
    return shown;
  }

  function tree(rows) {
    const lines = (members) => nodes(members, ({ line }) => line, MOST_LINES, () => undefined);
    const modules = (members) => nodes(members, ({ module }) => module, MOST_MODULES, lines);
    // Of more layers than there is room for, the lines say more than some of the layers.
    const inFamily = (members) => (new Set(members.map(({ module }) => module)).size > MOST_MODULES ? lines : modules)(members);
    const families = (members) => nodes(members, ({ module }) => family(module), MOST_MODULES, inFamily);
    const inside = rows.length > MANY_ROWS ? families : modules;
    return nodes(rows, ({ category }) => category, 20, inside).map(
      (node) => coloured(node, colours.get(node.name) || "#8c959f", 0));
  }

  // Each level of the map is paler than the one around it.
  function coloured(node, colour, level) {
    const pale = paler(colour, 0.28 * level);
    const children = node.children && node.children.map((child) => coloured(child, colour, level + 1));
    return { ...node, children, itemStyle: { color: pale, borderColor: pale } };
  }

  const paler = (colour, part) => `#${[1, 3, 5].map((at) => {
    const value = parseInt(colour.slice(at, at + 2), 16);
    return Math.round(value + part * (255 - value)).toString(16).padStart(2, "0");
  }).join("")}`;

  function fillTable(all) {
    const rows = all.length > MANY_ROWS ? rowsOfFamilies(all) : all;
    const cell = (text, kind) => Memfit.element("td", { class: kind }, text);
    const shown = rows.slice(0, MOST_ROWS).map((row) => Memfit.element("tr", {},
      cell(Memfit.bytes(row.bytes), "number"),
      cell(Memfit.share(row.bytes, total[point]), "number quiet spare"),
      Memfit.element("td", { class: "word" },
        Memfit.element("i", { class: "swatch", style: `background: ${colours.get(row.category)}` }), row.category),
      Memfit.element("td", { class: "mono long" }, row.module + counted(row.members),
        Memfit.element("div", { class: "quiet" }, row.line)),
      cell(row.blocks ? Memfit.grouped(row.blocks) : "", "number spare")));
    const rest = rows.slice(MOST_ROWS).reduce((sum, row) => sum + row.bytes, 0);
    if (rest) {
      shown.push(Memfit.element("tr", {}, cell(Memfit.bytes(rest), "number"),
        cell(Memfit.share(rest, total[point]), "number quiet spare"),
        cell(`(${Memfit.grouped(rows.length - MOST_ROWS)} others)`, "quiet"), cell("", ""), cell("", "spare")));
    }
    const heads = [["Bytes", "number"], ["Share", "number spare"], ["Category", ""], ["Module and line", ""], ["Blocks", "number spare"]];
    const phase = content.phases.find(({ begin, end }) => begin <= x[point] && x[point] < end);
    const moment = `${point === peak ? "At the peak: e" : "E"}vent ${Memfit.grouped(x[point])}`
      + `${phase ? `, ${phase.name}` : ""}, ${Memfit.bytes(total[point])} allocated`;
    table.replaceChildren(
      Memfit.element("p", { class: "next" }, moment),
      Memfit.element("table", {},
        Memfit.element("thead", {}, Memfit.element("tr", {},
          ...heads.map(([name, kind]) => Memfit.element("th", { class: kind }, name)))),
        Memfit.element("tbody", {}, ...shown)));
  }

  const counted = (members) => (members && members.size > 1 ? ` (${Memfit.grouped(members.size)} modules)` : "");

  // The end of a long name tells modules apart, not its beginning.
  const tail = (name) => (name.length > LONGEST_NAME ? `\u2026${name.slice(-LONGEST_NAME).replace(/^[^.]*\.(?=.)/, "")}` : name);

  function option() {
    const rows = rowsAt();
    fillTable(rows);
    const surface = Memfit.colour("--surface");
    const label = ({ name, value }) => `${name.split("/").at(-1)}\n${Memfit.bytes(value)}`;
    return {
      tooltip: Memfit.tooltip({ formatter: ({ value, treePathInfo }) => Memfit.tip(
        treePathInfo.slice(1).map(({ name }) => name).join(" > ") || "all",
        [["transparent", Memfit.share(value, total[point]), Memfit.bytes(value)]]) }),
      series: [{
        type: "treemap", name: "all", data: tree(rows), left: 0, right: 0, top: 0, bottom: 30, roam: false,
        leafDepth: 9, // all of them; without it the path below begins at whatever lies in the middle
        emphasis: { disabled: true },
        nodeClick: "zoomToNode", visibleMin: 60, childrenVisibleMin: 900,
        breadcrumb: { bottom: 0, height: 22, itemStyle: { color: Memfit.colour("--raised"),
          borderColor: Memfit.colour("--line"), textStyle: { color: Memfit.colour("--ink") } } },
        label: { formatter: label, color: "#101418", overflow: "truncate", fontSize: 11.5, lineHeight: 15 },
        upperLabel: { show: true, height: 20, color: "#101418", overflow: "truncate",
          formatter: ({ name, value }) => `${tail(name)}  ${Memfit.bytes(value)}` },
        itemStyle: { borderColor: surface, gapWidth: 1 },
        levels: [
          { itemStyle: { borderWidth: 0, gapWidth: 3 }, upperLabel: { show: false } },
          { itemStyle: { borderWidth: 2, gapWidth: 2 } },
          { itemStyle: { borderWidth: 1, gapWidth: 1 } },
          { itemStyle: { borderWidth: 1, gapWidth: 1 } },
        ],
      }],
    };
  }

  function ready(draw) {
    figure.append(table);
    Memfit.onChoice((chosen) => {
      point = chosen;
      chart.clear(); // else labels of what is gone stay
      draw();
    });
  }

  return { option, ready };
});
