"use strict";
// Fetches the page with a key and writes it into this document.
(() => {
  const KEY = "tilewise-key";
  const told = document.getElementById("told");
  async function open(key) {
    told.textContent = "…";
    let answer;
    try {
      answer = await fetch("/", { headers: { authorization: "Bearer " + key } });
    } catch {
      told.textContent = "The server does not answer.";
      return;
    }
    if (!answer.ok) {
      sessionStorage.removeItem(KEY);
      told.textContent = "The server does not know this key.";
      return;
    }
    const text = await answer.text();
    sessionStorage.setItem(KEY, key);
    document.open();
    document.write(text);
    document.close();
  }
  document.getElementById("gate").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = document.getElementById("key").value.trim();
    if (/^[\x21-\x7e]+$/.test(key)) open(key);
    else told.textContent = "A key is letters, digits and signs without spaces.";
  });
  const kept = sessionStorage.getItem(KEY);
  if (kept) open(kept);
})();
