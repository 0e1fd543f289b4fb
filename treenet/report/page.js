"use strict";
// Attention pictures: a target token shades the leaves and phrases that it attends to; so does, in the encoder, a leaf or phrase.
// Weights are uint16 [layers][heads][tokens][positions], 65535 is 1; positions are leaves, then phrases. Tokens of the encoder
// are its positions.
(() => {
  const views = JSON.parse(document.getElementById("views").textContent);
  const ALL = -1;
  const MOST = 8; // positions in the list below a picture

  const unpack = (text) => {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const out = new Float32Array(bytes.length / 2);
    for (let i = 0; i < out.length; i++) out[i] = (bytes[2 * i] + 256 * bytes[2 * i + 1]) / 65535;
    return out;
  };

  // [positions]: mean over the chosen layers, heads and tokens of the decoder or the encoder; ALL is every one of them.
  const attention = (view, from, layer, head, token) => {
    const range = (chosen, count) => (chosen === ALL ? [...Array(count).keys()] : [chosen]);
    const sum = new Float64Array(view.positions);
    const layers = range(layer, from.layers), heads = range(head, view.heads), tokens = range(token, from.tokens.length);
    for (const a of layers) for (const h of heads) for (const t of tokens) {
      const first = ((a * view.heads + h) * from.tokens.length + t) * view.positions;
      for (let p = 0; p < view.positions; p++) sum[p] += from.weights[first + p];
    }
    return sum.map((x) => x / (layers.length * heads.length * tokens.length));
  };

  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  // As share_text and shade in figures.py.
  const short = (share) => (100 * share < 0.5 ? "" : (100 * share).toFixed(100 * share >= 9.5 ? 0 : 1));
  const shade = (share) => Math.sqrt(share);

  for (const figure of document.querySelectorAll(".attention")) {
    const view = views[figure.dataset.view];
    const names = view.names.map((name) => name.replace("\t", " "));
    const decoder = { layers: view.layers, tokens: view.tokens, weights: unpack(view.weights), what: "target tokens" };
    const encoder = view.encoder && { layers: view.encoder.layers, tokens: names, weights: null, what: "positions of the source" };
    const [layer, head, source] = figure.querySelectorAll("select");
    const group = figure.querySelector(".tokens"), decoders = [...group.childNodes], label = group.getAttribute("aria-label");
    let from = decoder, buttons = [...group.querySelectorAll("button")];
    const boxes = [...figure.querySelectorAll("[data-p]")].map((group) => {
      const rect = group.querySelector("rect"), fill = rect.cloneNode();
      fill.setAttribute("class", "fill");
      rect.after(fill);
      return { fill, share: group.querySelector(".share") };
    });
    const readout = figure.querySelector(".readout");
    let pinned = buttons[0];

    const paint = (button) => {
      const token = Number(button.dataset.t);
      const shares = attention(view, from, Number(layer.value), Number(head.value), token);
      boxes.forEach(({ fill, share }, p) => {
        fill.style.fillOpacity = shade(shares[p]).toFixed(3);
        share.textContent = short(shares[p]);
      });
      const onPhrases = shares.slice(view.leaves).reduce((a, b) => a + b, 0);
      const what = document.createElement("p"), list = document.createElement("ol");
      const chosen = [["layer", layer], ["head", head]].filter(([, select]) => Number(select.value) !== ALL);
      const where = chosen.map(([name, select]) => `, ${name} ${Number(select.value) + 1}`).join("");
      const name = (token === ALL ? `All ${from.what}` : `\u201c${from.tokens[token]}\u201d`) + where;
      what.textContent = view.positions === view.leaves ? `${name}: all attention is on leaves, this model reads no tree`
        : `${name}: ${percent(onPhrases)} of the attention is on phrases, ${percent(1 - onPhrases)} on leaves`;
      const order = [...shares.keys()].sort((a, b) => shares[b] - shares[a] || a - b);
      for (const p of order.slice(0, MOST)) {
        const item = document.createElement("li"), place = document.createElement("span"), share = document.createElement("span");
        const mark = document.createElement("i");
        if (p >= view.leaves) mark.className = "node";
        const [label, phrase] = view.names[p].split("\t");
        if (phrase === undefined) place.append(mark, label);
        else {
          const strong = document.createElement("b");
          strong.textContent = label;
          place.append(mark, strong, ` ${phrase}`);
        }
        place.title = place.textContent;
        share.textContent = percent(shares[p]);
        item.append(place, share);
        list.append(item);
      }
      readout.replaceChildren(what, list);
    };

    const pin = (button, focus) => {
      for (const other of buttons) {
        other.setAttribute("aria-checked", String(other === button));
        other.tabIndex = other === button ? 0 : -1;
      }
      pinned = button;
      if (focus) button.focus();
      paint(button);
    };

    const listen = (button, i) => {
      button.addEventListener("mouseenter", () => paint(button));
      button.addEventListener("mouseleave", () => paint(pinned));
      button.addEventListener("click", () => pin(button, false));
      button.addEventListener("keydown", (event) => {
        const last = buttons.length - 1;
        const next = { ArrowRight: i === last ? 0 : i + 1, ArrowDown: i === last ? 0 : i + 1, ArrowLeft: i ? i - 1 : last,
          ArrowUp: i ? i - 1 : last, Home: 0, End: last }[event.key];
        if (next === undefined) return;
        event.preventDefault();
        pin(buttons[next], true);
      });
    };
    buttons.forEach(listen);

    // One button a leaf and phrase, in place of the target tokens.
    const makeButton = (text, token) => {
      const button = document.createElement("button"), label = text.split("\t");
      Object.assign(button, { type: "button", textContent: label[0], title: label.join(" ") });
      button.dataset.t = token;
      button.setAttribute("role", "radio");
      if (token === ALL || token >= view.leaves) button.className = "aside";
      return button;
    };
    const change = () => {
      const chosen = source.value === "encoder" ? encoder : decoder;
      if (chosen === encoder) encoder.weights ??= unpack(view.encoder.weights);
      from = chosen;
      const made = from === encoder ? [makeButton("all positions", ALL), ...view.names.map(makeButton)] : decoders;
      group.replaceChildren(...made.flatMap((one) => (from === encoder ? [one, " "] : [one])));
      group.setAttribute("aria-label", from === encoder ? label.replace("Target tokens", "Leaves and phrases") : label);
      buttons = [...group.querySelectorAll("button")];
      if (from === encoder) buttons.forEach(listen);
      const kept = Number(layer.value) < from.layers ? layer.value : String(ALL);
      const options = [...Array(from.layers).keys()].map((i) => new Option(String(i + 1), String(i)));
      layer.replaceChildren(new Option("mean", String(ALL)), ...options);
      layer.value = kept;
      pin(buttons[0], false);
    };
    source?.addEventListener("change", change);
    figure.querySelectorAll("[data-p]").forEach((group, p) => group.addEventListener("click", () => {
      if (from === encoder) pin(buttons[p + 1], false);
    }));
    for (const select of [layer, head]) select.addEventListener("change", () => paint(pinned));
    pin(pinned, false);
  }
})();
