"use strict";
// Sends lines, and draws what comes back. All text of answers goes through textContent: none of it is ever markup.
(() => {
  const START = "\u2581", END = "</s>", MOST = 8;
  const SVG = "http://www.w3.org/2000/svg";
  const PADDING = 5, GAP = 9, INNER_GAP = 3, LEVEL = 42, BOX = 28, MARGIN = 8, LEAST = 22; // CSS pixels, as in reports
  const find = (id) => document.getElementById(id);
  const form = find("form"), status = find("status"), send = find("send"), answers = find("answers");

  const make = (name, parent, text, attributes = {}) => {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    parent.append(element);
    return element;
  };
  const draw = (name, parent, attributes) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    parent.append(element);
    return element;
  };
  const say = (text, bad = false) => {
    status.textContent = text;
    status.className = bad ? "bad" : "";
  };
  const bare = (piece) => (piece.startsWith(START) ? piece.slice(1) : piece) || piece;
  const words = (leaves) => leaves.map((leaf, i) => (i && leaf.word !== leaves[i - 1].word ? " " : "") + bare(leaf.piece)).join("");
  const label = (name) => (name.includes("=") ? name.slice(name.indexOf("=") + 1) : name);

  const measure = (() => {
    const context = document.createElement("canvas").getContext("2d");
    context.font = "12px system-ui, sans-serif";
    return (text) => Math.max(context.measureText(text).width, LEAST) + 2 * PADDING;
  })();

  // Boxes of leaves, then of nodes: a node stands above the middle of its leaves, one level above what is below it.
  const layOut = ({ leaves, nodes }) => {
    const heights = nodes.map(() => 1);
    for (let i = nodes.length - 1; i >= 0; i--) {
      const parent = nodes[i].parent;
      if (parent >= 0) heights[parent] = Math.max(heights[parent], heights[i] + 1);
    }
    const gaps = leaves.map((leaf, i) => (i === 0 ? 0 : leaf.piece.startsWith(START) ? GAP : INNER_GAP));
    const columns = leaves.map((leaf) => measure(bare(leaf.piece)));
    const widths = nodes.map((node) => measure(label(node.label)));
    nodes.forEach(({ start, end }, i) => {
      let missing = widths[i];
      for (let k = start; k < end; k++) missing -= columns[k] + (k > start ? gaps[k] : 0);
      if (missing > 0) for (let k = start; k < end; k++) columns[k] += missing / (end - start);
    });
    const left = [], right = [];
    let edge = MARGIN;
    columns.forEach((width, i) => {
      left.push(edge + gaps[i]);
      edge += gaps[i] + width;
      right.push(edge);
    });
    const base = MARGIN + BOX / 2 + Math.max(0, ...heights) * LEVEL;
    const boxes = leaves.map((leaf, i) => ({
      text: bare(leaf.piece), title: `${leaf.piece} ${leaf.tag}`, node: false, x: (left[i] + right[i]) / 2, y: base,
      width: measure(bare(leaf.piece)),
    }));
    const innermost = leaves.map(() => -1), edges = [];
    nodes.forEach(({ label: name, start, end, parent }, i) => {
      const phrase = words(leaves.slice(start, end));
      boxes.push({ text: label(name), title: `${label(name)}: ${phrase}`, node: true, x: (left[start] + right[end - 1]) / 2,
        y: base - heights[i] * LEVEL, width: widths[i] });
      innermost.fill(i, start, end);
      if (parent >= 0) edges.push([leaves.length + parent, leaves.length + i]);
    });
    innermost.forEach((node, leaf) => { if (node >= 0) edges.push([leaves.length + node, leaf]); });
    return { boxes, edges, width: edge + MARGIN, height: base + BOX / 2 + MARGIN };
  };

  // The picture; returns a function that shades it by shares of attention.
  const drawTree = (tree, parent) => {
    const { boxes, edges, width, height } = layOut(tree);
    const holder = make("div", parent, undefined, { class: "box", tabindex: "0", role: "region", "aria-label": "tree" });
    const svg = draw("svg", holder, { class: "tree", role: "img", "aria-label": tree.brackets, width, height });
    const lines = edges.map(([above, below]) => {
      const [upper, lower] = [boxes[above], boxes[below]], top = upper.y + BOX / 2, bar = top + (LEVEL - BOX) / 2;
      return `M${upper.x} ${top}V${bar}H${lower.x}V${lower.y - BOX / 2}`;
    });
    draw("path", svg, { class: "edges", d: lines.join("") });
    const parts = boxes.map(({ text, title, node, x, y, width: wide }) => {
      const group = draw("g", svg, { class: node ? "node" : "leaf" });
      draw("title", group, {}).textContent = title;
      const place = { x: x - wide / 2, y: y - BOX / 2, width: wide, height: BOX, rx: node ? 9 : 3 };
      draw("rect", group, place);
      const fill = draw("rect", group, { ...place, class: "fill", "fill-opacity": 0 });
      draw("text", group, { class: "name", x, y: y - 1.5 }).textContent = text;
      return { fill, share: draw("text", group, { class: "share", x, y: y + 10 }) };
    });
    const shade = (shares) => parts.forEach(({ fill, share }, i) => {
      const one = shares[i] ?? 0;
      fill.setAttribute("fill-opacity", Math.sqrt(one).toFixed(3));
      share.textContent = 100 * one < 0.5 ? "" : (100 * one).toFixed(100 * one >= 9.5 ? 0 : 1);
    });
    return { boxes, shade };
  };

  // Rows of weights that one word of the translation has: its pieces stand together.
  const groups = (targets) => {
    const found = [{ text: "all words", rows: targets.map((_, i) => i) }];
    targets.forEach((piece, i) => {
      if (piece === END && i === targets.length - 1) found.push({ text: "end", rows: [i] });
      else if (piece.startsWith(START) || found.length === 1) found.push({ text: bare(piece), rows: [i] });
      else {
        found.at(-1).text += piece;
        found.at(-1).rows.push(i);
      }
    });
    return found;
  };

  const showAttention = ({ targets, weights }, { boxes, shade }, parent) => {
    const choice = make("div", parent, undefined, { class: "tokens", role: "radiogroup", "aria-label": "words of the translation" });
    const readout = make("div", parent, undefined, { class: "readout" });
    const choose = (group, button) => {
      for (const other of choice.children) other.setAttribute("aria-checked", String(other === button));
      const shares = weights[0].map((_, p) => group.rows.reduce((sum, row) => sum + weights[row][p], 0) / group.rows.length);
      shade(shares);
      const list = document.createElement("ol");
      const order = [...shares.keys()].sort((a, b) => shares[b] - shares[a] || a - b);
      for (const p of order.slice(0, MOST)) {
        const item = make("li", list), place = make("span", item);
        make("i", place, undefined, boxes[p].node ? { class: "node" } : {});
        place.append(boxes[p].node ? boxes[p].title : boxes[p].text);
        make("span", item, `${(100 * shares[p]).toFixed(1)} %`);
      }
      readout.replaceChildren(list);
    };
    const buttons = groups(targets).map((group) => {
      const button = make("button", choice, group.text, { type: "button", role: "radio", "aria-checked": "false", dir: "auto" });
      button.addEventListener("click", () => choose(group, button));
      return () => choose(group, button);
    });
    buttons[0]();
  };

  const showTranslation = (line) => {
    const section = make("section", answers, undefined, { class: "attention" });
    make("p", section, line.source, { class: "source", dir: "auto" });
    if (line.error) make("p", section, `No translation: ${line.error}`, { class: "bad" });
    else make("p", section, line.translation, { class: "translation answer", dir: "auto" });
    for (const warning of line.warnings) make("p", section, warning, { class: "bad" });
    const picture = line.tree && line.tree.leaves.length ? drawTree(line.tree, section) : null;
    if (line.attention && picture) showAttention(line.attention, picture, section);
    if (line.hypotheses.length > 1) {
      const list = make("ol", section, undefined, { class: "others" });
      for (const { text, score } of line.hypotheses) {
        const item = make("li", list, text, { dir: "auto" });
        make("span", item, score === null ? "" : `  ${score.toFixed(3)}`, { class: "p" });
      }
    }
  };

  const percent = (share) => `${(100 * share).toFixed(1)} %`;

  // The most probable classes, and the class of every phrase if the model knows them.
  const showClasses = (line) => {
    const section = make("section", answers, undefined, { class: "attention" });
    for (const text of line.source.split("\t")) make("p", section, text, { class: "source", dir: "auto" });
    if (line.error) make("p", section, `No class: ${line.error}`, { class: "bad" });
    else make("p", section, line.label, { class: "translation answer", dir: "auto" });
    for (const warning of line.warnings) make("p", section, warning, { class: "bad" });
    const order = Object.entries(line.probabilities).sort(([, a], [, b]) => b - a).slice(0, MOST);
    const list = order.length ? make("ol", section, undefined, { class: "others classes" }) : null;
    for (const [name, probability] of order) {
      const item = make("li", list, name, { dir: "auto" });
      make("span", item, `  ${percent(probability)}`, { class: "p" });
    }
    for (const tree of [line.tree, line.second_tree]) if (tree && tree.leaves.length) drawTree(tree, section);
    const phrases = line.phrases.length ? make("ul", section, undefined, { class: "others phrases" }) : null;
    for (const { text, label: name, probability } of line.phrases) {
      const item = make("li", phrases, text, { dir: "auto" });
      make("span", item, `  ${name}, ${percent(probability)}`, { class: "p" });
    }
  };

  // What the model does: the address of its questions, the words of the page, and what to send beside the lines.
  const TRANSLATOR = { path: "/translate", verb: "Translate", doing: "Translating ...", show: showTranslation,
    lead: "Type a sentence. The page shows its tree and its translation. Choose a word of the translation to see the words and phrases that it attends to." };
  const CLASSIFIER = { path: "/classify", verb: "Classify", doing: "Classifying ...", show: showClasses,
    lead: "Type a sentence. The page shows its classes and its tree." };
  const PAIRS = "Type two texts, each on one line. The page shows the classes of the pair, and the trees.";
  const ready = fetch("/openapi.json").then((answer) => answer.json()).then((api) => {
    const model = CLASSIFIER.path in api.paths ? CLASSIFIER : TRANSLATOR, fields = api.components.schemas.Request.properties;
    send.textContent = model.verb;
    const pairs = model === CLASSIFIER && "prefixItems" in fields.lines.items;
    find("model").textContent = pairs ? PAIRS : model.lead;
    find("address").textContent = `POST ${model.path}`;
    find("num-best-field").hidden = !fields.num_best;
    const most = fields.num_best ? fields.num_best.maximum : 0;
    for (let n = 1; n <= most; n++) make("option", find("num-best"), String(n), n === most ? { selected: "" } : {});
    const more = () => (fields.num_best ? { num_best: Number(find("num-best").value), attention: true }
      : fields.phrases ? { phrases: true } : {});
    return { ...model, more, pairs };
  });

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    let lines = find("text").value.split("\n").filter((line) => line.trim());
    if (!lines.length) return say("Type a sentence first.", true);
    send.disabled = true;
    answers.replaceChildren();
    try {
      const model = await ready;
      if (model.pairs && lines.length % 2) return say("A pair has two lines.", true);
      if (model.pairs) lines = lines.flatMap((line, i) => (i % 2 ? [] : [[line, lines[i + 1]].map((one) => one.replaceAll("\t", " "))]));
      say(model.doing);
      const headers = { "Content-Type": "application/json" };
      if (find("token").value) headers.Authorization = `Bearer ${find("token").value}`;
      const body = JSON.stringify({ lines, ...model.more() });
      const answer = await fetch(model.path, { method: "POST", headers, body });
      // Too many connections get a line of plain text from uvicorn.
      const found = await answer.json().catch(() => ({ error: `The server refuses: status ${answer.status}.` }));
      if (answer.status === 401) find("token-field").hidden = false;
      if (!answer.ok) return say(found.error, true);
      found.lines.forEach(model.show);
      say("");
    } catch (error) {
      say(`The server does not answer: ${error.message}`, true);
    } finally {
      send.disabled = false;
    }
  });
})();
