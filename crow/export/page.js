
"use strict";
(() => {
  const get = (id) => document.getElementById(id);
  const entries = [...document.querySelectorAll(".entry")];
  const texts = [];
  const query = get("query"), found = get("found"), fold = get("fold");
  let hits = [], at = -1, timer = 0;

  const reveal = (element) => {
    for (let up = element; up; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
  };
  const mark = (entry, words) => {
    if (!window.CSS || !CSS.highlights) return null;
    const ranges = [];
    const walker = document.createTreeWalker(entry, NodeFilter.SHOW_TEXT);
    for (let node; (node = walker.nextNode()) && ranges.length < 500; ) {
      const text = node.data.toLowerCase();
      for (let from = 0; (from = text.indexOf(words, from)) >= 0 && ranges.length < 500; from += words.length) {
        if (from + words.length > node.length) break;
        const range = new Range();
        range.setStart(node, from);
        range.setEnd(node, from + words.length);
        ranges.push(range);
      }
    }
    CSS.highlights.set("found", new Highlight(...ranges));
    return ranges[0] || null;
  };
  const clear = () => {
    if (hits[at]) hits[at].classList.remove("current");
    if (window.CSS && CSS.highlights) CSS.highlights.delete("found");
  };
  const show = (index) => {
    clear();
    at = hits.length ? (index + hits.length) % hits.length : -1;
    found.value = !query.value.trim() ? "" : hits.length ? `${at + 1} of ${hits.length}` : "no matches";
    if (at < 0) return;
    const entry = hits[at];
    reveal(entry);
    entry.classList.add("current");
    entry.scrollIntoView({ block: "start" });
    const range = mark(entry, query.value.trim().toLowerCase());
    if (!range) return;
    reveal(range.startContainer.parentElement);
    range.startContainer.parentElement.scrollIntoView({ block: "center" });
  };
  const search = () => {
    const words = query.value.trim().toLowerCase();
    clear();
    hits = !words ? [] : entries.filter((entry, n) => (texts[n] ??= entry.textContent.toLowerCase()).includes(words));
    show(0);
  };
  query.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(search, 200);
  });
  query.addEventListener("keydown", (event) => {
    if (event.key === "Enter") show(at + (event.shiftKey ? -1 : 1));
    if (event.key === "Escape") {
      query.value = "";
      search();
    }
  });
  get("previous").addEventListener("click", () => show(at - 1));
  get("next").addEventListener("click", () => show(at + 1));
  fold.addEventListener("click", () => {
    const open = fold.getAttribute("aria-pressed") !== "true";
    fold.setAttribute("aria-pressed", String(open));
    fold.textContent = open ? "Fold all" : "Open all";
    for (const one of document.querySelectorAll("main details")) one.open = open;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target === query) return;
    event.preventDefault();
    query.focus();
  });
  const jump = () => {
    const target = /^#(entry|branch)-\d+$/.test(location.hash) && get(location.hash.slice(1));
    if (!target) return;
    reveal(target);
    target.scrollIntoView({ block: "start" });
  };
  addEventListener("hashchange", jump);
  document.querySelector(".tools").hidden = false;
  if (matchMedia("(min-width: 64rem)").matches) document.querySelector(".contents").open = true;
  jump();
})();
