"use strict";
// The list of all sentences: sorted and filtered by what the form says, drawn some rows at a time.
// Every text of the data becomes a text node; none is read as markup.
(() => {
  const data = JSON.parse(document.getElementById("lines-data").textContent);
  const form = document.querySelector(".filters"), list = document.querySelector("ol.lines");
  const status = document.querySelector(".count"), more = document.querySelector("button.more");
  const FIRST = 10, ROWS = 50; // drawn at the start, and with every click on the button
  const MOST_WORDS = 400; // of a line whose words are compared: the table grows with its square
  const paired = data.baseline !== null;
  const WORD = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}\p{Script=Myanmar}]|[\p{L}\p{M}\p{N}_]+|\s+|\S/gu;

  const element = (name, text, classes) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (classes) made.className = classes;
    return made;
  };
  const signed = (x) => (x < 0 ? "\u2212" : "+") + Math.abs(x).toFixed(1);
  const split = (line) => line.match(WORD) ?? [];
  const isWord = (token) => token.trim() !== "";

  // For each word of `a`, whether a longest common subsequence of both has it.
  const common = (a, b) => {
    const width = b.length + 1, table = new Uint16Array((a.length + 1) * width);
    for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--) {
      const skip = Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
      table[i * width + j] = a[i] === b[j] ? table[(i + 1) * width + j + 1] + 1 : skip;
    }
    const found = new Array(a.length).fill(false);
    for (let i = 0, j = 0; i < a.length && j < b.length;) {
      if (a[i] === b[j]) { found[i++] = true; j++; }
      else if (table[(i + 1) * width + j] >= table[i * width + j + 1]) i++;
      else j++;
    }
    return found;
  };

  // The line as text and marks: words that `other` lacks, or without one, those that the reference lacks.
  const marked = (line, reference, other) => {
    const out = element("dd"), tokens = split(line), words = tokens.filter(isWord);
    const references = split(reference).filter(isWord), others = other === null ? null : split(other).filter(isWord);
    out.dir = "auto";
    if (Math.max(words.length, references.length, others?.length ?? 0) > MOST_WORDS) {
      out.append(line, element("span", ` (more than ${MOST_WORDS} words: not compared)`, "p"));
      return out;
    }
    const right = common(words, references), same = others === null ? right : common(words, others);
    let word = 0;
    for (const token of tokens) {
      if (!isWord(token)) { out.append(token); continue; }
      out.append(same[word] ? token : element("mark", token, right[word] ? "right" : "wrong"));
      word++;
    }
    return out;
  };

  const value = (name) => form.elements[name]?.value ?? "";
  const system = () => (value("system") !== "" ? Number(value("system")) : data.systems.findIndex((_, i) => i !== data.baseline));
  const change = (row, chosen) => data.chrf[chosen][row] - (paired ? data.chrf[data.baseline][row] : 0);

  // Numbers of the rows that the form asks for, in its order.
  const choose = () => {
    const chosen = system(), changes = data.line.map((_, row) => change(row, chosen)), text = value("text").toLowerCase();
    const columns = { change: changes, words: data.words, depth: data.depth, line: data.line, chrf: data.chrf[chosen] };
    const limits = ["change", "words", "depth"].flatMap((name) => [["from", 1], ["to", -1]].map(([end, sign]) =>
      [columns[name], value(`${name}-${end}`), sign])).filter(([, limit]) => limit !== "");
    const within = (row) => limits.every(([column, limit, sign]) => sign * (column[row] - Number(limit)) >= -1e-9);
    const shown = paired ? [data.baseline, chosen] : [chosen];
    const holds = (row) => !text || [data.source[row], data.reference[row], ...shown.map((one) => data.translations[one][row])]
      .some((line) => line.toLowerCase().includes(text));
    const rows = [...data.line.keys()].filter((row) => within(row) && holds(row));
    const [name, way] = value("order").split("-"), column = columns[name];
    const key = { up: (row) => column[row], down: (row) => -column[row], size: (row) => -Math.abs(column[row]) }[way];
    return rows.sort((a, b) => key(a) - key(b) || a - b);
  };

  const draw = (row) => {
    const chosen = system(), item = element("li"), head = element("p", undefined, "head"), texts = element("dl", undefined, "text");
    head.append(element("b", `Line ${data.line[row]}`), ` ${data.words[row]} words, depth ${data.depth[row]}`);
    if (paired) head.append(", chrF ", element("b", signed(change(row, chosen))));
    if (data.pictures.includes(data.line[row])) {
      const link = element("a", "attention");
      link.href = `#line-${data.line[row]}`;
      head.append(", ", link);
    }
    item.dataset.line = data.line[row];
    for (const [name, line] of [["source", data.source[row]], ["reference", data.reference[row]]]) {
      const shown = element("dd", line);
      shown.dir = "auto";
      texts.append(element("dt", name), shown);
    }
    for (const one of paired ? [data.baseline, chosen] : [chosen]) {
      const name = element("dt", data.systems[one]);
      name.append(element("span", ` ${data.chrf[one][row].toFixed(1).padStart(5, "\u2007")}`, "p")); // as wide as 100.0
      const other = paired ? data.translations[one === chosen ? data.baseline : chosen][row] : null;
      texts.append(name, marked(data.translations[one][row], data.reference[row], other));
    }
    item.append(head, texts);
    return item;
  };

  let rows = [], drawn = 0;
  const extend = () => {
    const next = Math.min(rows.length, drawn + (drawn ? ROWS : FIRST));
    list.append(...rows.slice(drawn, next).map(draw));
    drawn = next;
    const left = rows.length - drawn;
    more.hidden = left === 0;
    more.textContent = `Show ${Math.min(ROWS, left)} more`;
    const [all, found] = [data.line.length, rows.length].map((count) => count.toLocaleString("en"));
    status.textContent = `${found} of ${all} sentences, ${drawn.toLocaleString("en")} drawn`;
  };
  const update = () => {
    rows = choose();
    drawn = 0;
    list.replaceChildren();
    extend();
  };

  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(update));
  more.addEventListener("click", () => {
    const first = drawn;
    extend();
    const item = list.children[first]; // the keyboard goes on where the new rows begin
    item.tabIndex = -1;
    item.focus({ preventScroll: true });
  });
  update();
})();
