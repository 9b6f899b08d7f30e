// Puts a button beside every text to copy, if the browser allows a page to copy.
"use strict";

for (const text of navigator.clipboard ? document.querySelectorAll("[data-copy]") : []) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.setAttribute("aria-label", `Copy: ${text.dataset.what}`);
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text.dataset.copy);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  (text.closest(".wide") ?? text).after(button);
}
