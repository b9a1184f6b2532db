"use strict";
// Opens a page that was exported with the answers of a step, from its file alone: node export.js HOME FILE FILES STEP.
const { withPage, until, run } = require("./browser.js");
const [home, file, files, step] = process.argv.slice(2);

// Of each view, what is there once it is drawn. Of the store a copy has nothing.
const VIEWS = { run: "#main canvas", goodput: "#main table", samples: "#main tr[data-position]", fleet: "#main table", time: "#main canvas.timeline" };

run(async () => {
  await withPage(home, files, async (page) => {
    await page.setViewport({ width: 1200, height: 800 });
    for (const [name, drawn] of Object.entries(VIEWS)) {
      await page.goto(`file://${file}#${name}`);
      await page.waitForSelector(drawn);
    }
    await page.goto(`file://${file}#samples`);
    await until(page, `answers of step ${step}`, (wanted) => document.querySelector("#main .note")?.innerText.includes(`of step ${wanted}`), step);
    await page.click("#main tr[data-position]");
    await until(page, "the tokens of an answer", () => document.querySelectorAll("aside [data-token]").length > 0);
  });
  console.log(`${Object.keys(VIEWS).length} views and the answers of step ${step}, out of one file`);
});
