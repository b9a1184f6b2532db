//! Python packages that our rewards and prompts are compared with, that hooks call, that read what a run tells, that call the
//! gateway or servers of tools, and whose environments are trained on; those that do not go together in environments of
//! their own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, Result};
use crate::{install, process};

/// Packages in an environment.
struct Home {
    /// The directory in the cache: another one for other packages.
    name: &'static str,
    packages: &'static [&'static str],
    /// Packages without what they ask for: a page of their own, for one.
    bare: &'static [&'static str],
    /// What programs that the packages start with uv are made of, as wheels beside the environment.
    programs: &'static [&'static str],
    /// Whether chat templates of checkpoints lie beside the environment.
    has_templates: bool,
}

const HOMES: [&Home; 5] = [&REWARDS, &VERIFIERS, &TOOLS, &FAMILIES, &OPENENV];

const REWARDS: Home = Home {
    name: "math-verify-0.9.0-reasoning-gym-0.1.25-tensorboard-2.21.0-openai-3.57.0-anthropic-2.14.0-opentelemetry-proto-1.45.2-wandb-0.31.0-trackio-0.43.0",
    packages: &[
        "math-verify==0.9.0",
        "reasoning-gym==0.1.25",
        "tensorboard==2.21.0",
        "openai==3.57.0",
        "anthropic==2.14.0",
        "opentelemetry-proto==1.45.2",
        "wandb==0.31.0",
        "trackio==0.43.0",
    ],
    bare: &[],
    programs: &[],
    has_templates: false,
};

/// It wants an older client of OpenAI.
const VERIFIERS: Home = Home {
    name: "verifiers-0.4.0-textarena-0.7.4-uv-0.9.18",
    packages: &["verifiers[ta]==0.4.0", "textarena==0.7.4", "uv==0.9.18"],
    bare: &[],
    programs: &["openai==3.57.0", "mcp==2.0.0", "httpx", "httpx2", "tenacity", "certifi"],
    has_templates: false,
};

/// What asks servers of tools.
const TOOLS: Home = Home {
    name: "mcp-2.3.0-openai-3.57.0",
    packages: &["mcp==2.3.0", "openai==3.57.0"],
    bare: &[],
    programs: &[],
    has_templates: false,
};

/// What renders conversations, continues them and reads answers, for each family of models. `renderers` imports `httpx`
/// without asking for it.
const FAMILIES: Home = Home {
    name: "renderers-0.1.12-transformers-4.57.1-llama-cpp-python-0.3.36",
    packages: &["renderers==0.1.12", "transformers==4.57.1", "httpx==0.28.1"],
    bare: &[],
    programs: &[],
    has_templates: true,
};

/// It wants an older client of MCP.
const OPENENV: Home = Home {
    name: "openenv-0.10.0-fastmcp-3.4.11-openai-3.57.0",
    packages: &[
        "fastapi==0.165.0",
        "uvicorn==0.54.0",
        "websockets==17.4",
        "fastmcp==3.4.11",
        "httpx==0.28.1",
        "requests==2.32.5",
        "openai==3.57.0",
    ],
    bare: &["openenv==0.10.0"],
    programs: &[],
    has_templates: false,
};

/// Directory of these wheels.
const WHEELS: &str = "wheels";
/// Directory of chat templates.
const TEMPLATES: &str = "templates";
/// File whose presence says that the installation ran to its end.
const MARKER: &str = "installed";

/// What is missing and how to get it, or `None`.
pub(crate) fn missing(cache: &Path) -> Option<String> {
    let found = HOMES.iter().all(|home| cache.join(home.name).join(MARKER).is_file());
    (!found).then(|| {
        "math-verify, reasoning-gym, tensorboard, openai, anthropic, verifiers, mcp, openenv and renderers (cargo xtask test --ci rewards)"
            .to_owned()
    })
}

/// The interpreter of the first.
pub(crate) fn python(cache: &Path) -> PathBuf {
    cache.join(REWARDS.name).join("bin/python")
}

/// The interpreter that has verifiers, and the variables that have uv make what that starts of the wheels beside it. It has no
/// variable for no index: the directory is its only one.
pub(crate) fn verifiers(cache: &Path) -> (PathBuf, [(&'static str, String); 2]) {
    let home = cache.join(VERIFIERS.name);
    let wheels = home.join(WHEELS).display().to_string();
    (home.join("bin/python"), [("UV_DEFAULT_INDEX", format!("file://{wheels}")), ("UV_FIND_LINKS", wheels)])
}

/// The interpreter that has what tools need.
pub(crate) fn tools(cache: &Path) -> PathBuf {
    cache.join(TOOLS.name).join("bin/python")
}

/// The interpreter that has renderers, and checkpoints' templates.
pub(crate) fn families(cache: &Path) -> (PathBuf, PathBuf) {
    let home = cache.join(FAMILIES.name);
    (home.join("bin/python"), home.join(TEMPLATES))
}

/// The interpreter that has openenv.
pub(crate) fn openenv(cache: &Path) -> PathBuf {
    cache.join(OPENENV.name).join("bin/python")
}

/// Installs what is not there. What an interrupted installation left is begun anew.
pub(crate) fn install(cache: &Path) -> Result<()> {
    HOMES.iter().filter(|home| !cache.join(home.name).join(MARKER).is_file()).try_for_each(|home| {
        println!("rewards: {} from PyPI (0.1 to 0.7 GB)", [home.packages, home.bare].concat().join(", "));
        let at = cache.join(home.name);
        process::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&at))?;
        let python = at.join("bin/python");
        process::run(install::pip(&python).args(home.packages))?;
        if !home.bare.is_empty() {
            process::run(install::pip(&python).arg("--no-deps").args(home.bare))?;
        }
        if !home.programs.is_empty() {
            let mut download = Command::new(&python);
            download.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check"]);
            process::run(download.arg("--dest").arg(at.join(WHEELS)).args(home.programs))?;
        }
        if home.has_templates {
            let script = crate::workspace().join("xtask/models/templates.py");
            process::run(Command::new(&python).arg(script).arg(at.join(TEMPLATES)))?;
        }
        let marker = at.join(MARKER);
        fs::write(&marker, "").map_err(Error::io(marker))
    })
}
