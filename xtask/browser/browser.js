"use strict";
// What all looks at a page have in common: the browser, and what it has to complain of.

// Waits for a condition end then: a machine that others use takes its time.
exports.DEADLINE = 300_000;

// Has `act` use a page in the browser that `unpack.js` put into `home`. What the page complains of is in the list that
// `act` gets, and fails the look. `files` is a directory for what the browser writes.
exports.withPage = async (home, files, act) => {
  const puppeteer = require(`${home}/node_modules/puppeteer-core`);
  const browser = await puppeteer.launch({
    executablePath: `${home}/chromium`,
    args: ["--no-sandbox", "--headless=new", "--disable-gpu", "--disable-dev-shm-usage"],
    env: { ...process.env, LD_LIBRARY_PATH: `${home}/al2023/lib`, FONTCONFIG_PATH: `${home}/fonts/fonts`, LC_ALL: "en_US.UTF-8", LANG: "en_US.UTF-8", HOME: files },
  });
  const wrong = [];
  try {
    const page = await browser.newPage();
    page.setDefaultTimeout(exports.DEADLINE);
    page.on("console", (message) => ["error", "warn"].includes(message.type()) && wrong.push(message.text()));
    page.on("pageerror", (error) => wrong.push(error.stack));
    page.on("requestfailed", (request) => wrong.push(`${request.url()}: ${request.failure()?.errorText}`));
    await act(page, wrong);
  } finally {
    await browser.close();
  }
  if (wrong.length) throw new Error(`the browser complains: ${wrong.join("; ")}`);
};

// Waits until a condition holds in the page, and hands over what it gave; `what` is what was expected.
exports.until = async (page, what, condition, ...args) => {
  try {
    return await (await page.waitForFunction(condition, {}, ...args)).jsonValue();
  } catch (error) {
    throw new Error(`expected ${what}: ${error.message}`);
  }
};

// Runs a look to its end, and says what is wrong.
exports.run = (main) =>
  main().catch((error) => {
    console.error(error.message);
    process.exit(1);
  });
