//! Chromium from npm, which looks at the page of `driftless dashboard`.
//!
//! `@sparticuz/chromium` packs a build of Chromium with the libraries that a server lacks; `puppeteer-core` drives it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::install;
use crate::process::{self, Background, found};

/// The directory in the cache: another one for other packages.
const HOME: &str = "chromium-147.0.0-puppeteer-core-24.43.1";
const PACKAGES: [&str; 2] = ["@sparticuz/chromium@147.0.0", "puppeteer-core@24.43.1"];
/// A file of a complete installation.
const PROGRAM: &str = "chromium";
/// The command reads the run before it listens.
const READY: Duration = Duration::from_secs(60);

/// What is missing and how to get it, or `None`.
pub(crate) fn missing(cache: &Path) -> Option<String> {
    let absent = !home(cache).join(PROGRAM).is_file();
    absent.then(|| format!("{}, 330 MB (cargo xtask test --ci demo)", PACKAGES.join(" and ")))
}

/// Installs it into the cache; npm for the system, where that is not there.
pub(crate) fn install(cache: &Path) -> Result<()> {
    if !found("npm") {
        process::apt("demo", &["npm"])?;
    }
    println!("demo: {}", PACKAGES.join(", "));
    install::into_place(&home(cache), PROGRAM, |partial| {
        let mut npm = Command::new("npm");
        npm.args(["install", "--silent", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix"]);
        process::run(npm.arg(partial).args(PACKAGES))?;
        process::run(Command::new("node").arg(script("unpack.js")).arg(partial))
    })
}

/// Has the browser look at each view of a run's page, in two sizes, and puts the pictures into the directory `pictures`.
pub(crate) fn look(cache: &Path, program: &Path, run: &Path, pictures: &Path, log: &Path) -> Result<()> {
    install::remove(pictures)?;
    fs::create_dir_all(pictures).map_err(Error::io(pictures))?;
    let port = process::free_port()?;
    let mut dashboard = Command::new(program);
    dashboard.arg("dashboard").arg(run).args(["--listen", &format!("127.0.0.1:{port}")]);
    let mut serving = Background::start("the dashboard", &mut dashboard, &pictures.join("dashboard.log"))?;
    serving.wait_listening(port, READY)?;
    let mut looks = Command::new("node");
    looks.arg(script("look.js")).arg(home(cache)).arg(format!("http://127.0.0.1:{port}")).arg(pictures);
    process::run_logged(&mut looks, log)
}

fn home(cache: &Path) -> PathBuf {
    cache.join(HOME)
}

fn script(name: &str) -> PathBuf {
    crate::workspace().join("xtask/browser").join(name)
}
