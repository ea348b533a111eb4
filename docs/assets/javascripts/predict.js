/* The predict box: the reader commits to a number, then the record is shown beside it. The guess stays in this browser.
   Without this script the record is still there, folded.
   SPDX-License-Identifier: MIT */
(function () {
  "use strict";
  const memory = new Map();   // stands in where storage is refused, as it may be for a page opened as a file

  const store = {
    get(key) {
      try { return localStorage.getItem(key); } catch (_) { return memory.has(key) ? memory.get(key) : null; }
    },
    set(key, value) {
      try { localStorage.setItem(key, value); } catch (_) { memory.set(key, value); }
    },
    remove(key) {
      try { localStorage.removeItem(key); } catch (_) { memory.delete(key); }
    },
  };

  const show = (x) => Number.isInteger(x) && Math.abs(x) < 1e6 ? String(x) : String(Number(x.toPrecision(3)));

  function verdict(guess, answer, unit) {
    const with_unit = (x) => show(x) + (unit ? (unit === "×" || unit === "%" ? unit : " " + unit) : "");
    const head = `You guessed ${with_unit(guess)}; the record says ${with_unit(answer)}. `;
    if (guess === answer) return head + "That is the figure itself.";
    if (answer === 0 || guess === 0 || (guess < 0) !== (answer < 0)) return head + `You are off by ${with_unit(Math.abs(guess - answer))}.`;
    return head + `Guess over record: ${show(guess / answer)}.`;
  }

  function set_up(form) {
    if (form.dataset.ready) return;
    form.dataset.ready = "yes";
    const question = form.querySelector(".predict-question");
    if (question) form.setAttribute("aria-label", "Predict: " + question.textContent.trim());
    const key = "gemm-book:predict:" + form.dataset.key;
    const answer = Number(form.dataset.answer);
    const unit = form.dataset.unit || "";
    const input = form.querySelector("input");
    const commit = form.querySelector("button[type=submit]");
    const output = form.querySelector("output");
    const details = form.querySelector("details");
    const reset = document.createElement("button");
    reset.type = "button";
    reset.className = "predict-reset";
    reset.textContent = "Forget my guess";
    reset.hidden = true;
    commit.after(reset);

    const summary = details ? details.querySelector("summary") : null;
    const unguessed = summary ? summary.textContent : "";

    function reveal(guess) {
      input.value = String(guess);
      input.readOnly = true;
      commit.hidden = true;
      reset.hidden = false;
      output.hidden = false;
      output.textContent = verdict(guess, answer, unit);
      form.classList.add("committed");
      if (details) details.open = true;
      if (summary) summary.textContent = "The record";
    }

    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const guess = input.valueAsNumber;
      if (!Number.isFinite(guess)) { input.focus(); return; }
      store.set(key, String(guess));
      reveal(guess);
      reset.focus();
    });

    reset.addEventListener("click", () => {
      store.remove(key);
      input.value = "";
      input.readOnly = false;
      commit.hidden = false;
      reset.hidden = true;
      output.hidden = true;
      output.textContent = "";
      form.classList.remove("committed");
      if (details) details.open = false;
      if (summary) summary.textContent = unguessed;
      input.focus();
    });

    const kept = store.get(key);
    if (kept !== null && Number.isFinite(Number(kept))) reveal(Number(kept));
  }

  const run = () => document.querySelectorAll("form.predict").forEach(set_up);
  if (typeof document$ !== "undefined") document$.subscribe(run);
  else if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", run);
  else run();
})();
