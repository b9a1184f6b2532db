//! `cargo xtask release`: everything that users install, made from this clone into one directory.

use crate::error::{Error, Result};
use crate::{cache_dir, install, process, target_dir, workspace};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Directory that gets the files [default: target/release-files]. What this command has put there earlier is removed.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Only for these processors; may be given several times [default: all].
    #[arg(long, value_enum)]
    arch: Vec<Arch>,
    /// OpenSSH private key that signs the checksums.
    #[arg(long, value_name = "FILE")]
    sign_key: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Arch {
    #[value(name = "x86_64")]
    X86_64,
    #[value(name = "aarch64")]
    Aarch64,
}

impl Arch {
    const ALL: [Arch; 2] = [Arch::X86_64, Arch::Aarch64];

    fn target(self) -> &'static str {
        match self {
            Arch::X86_64 => "x86_64-unknown-linux-gnu",
            Arch::Aarch64 => "aarch64-unknown-linux-gnu",
        }
    }
}

/// The glibc of Debian 10 and RHEL 8, and the tag of wheels for it.
const GLIBC: &str = "2.28";
const MANYLINUX: &str = "manylinux_2_28";
/// What links against an older glibc than this machine's, for this and other processors.
const TOOLS: [&str; 3] = ["maturin==1.16.0", "ziglang==0.15.2", "cargo-zigbuild==0.24.1"];
/// Their directory in the cache: another one for other tools.
const HOME: &str = "release-maturin-1.16.0-ziglang-0.15.2-cargo-zigbuild-0.24.1";
/// What binaries are built with: everything but libtorch.
const FEATURES: &str = "cli";
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The file of checksums.
const SUMS: &str = "SHA256SUMS";
/// What tells a directory that this command has filled from one into which somebody has downloaded a release.
const MARKER: &str = ".made-by-xtask-release";
/// The names that `ssh-keygen -Y` signs for and under.
const NAMESPACE: &str = "driftless-release";
/// Who may have signed, as `ssh-keygen -Y verify` wants it.
const SIGNERS: &str = "allowed_signers";

pub(crate) fn run(options: &Options) -> Result<()> {
    let out = options.out.clone().unwrap_or_else(|| target_dir().join("release-files"));
    // Maturin runs elsewhere.
    let out = std::path::absolute(&out).map_err(Error::io(&out))?;
    emptied(&out)?;
    let tools = Tools::install(&cache_dir()?)?;
    let all = if options.arch.is_empty() { Arch::ALL.to_vec() } else { options.arch.clone() };
    for arch in &all {
        println!("release  the wheel for {} ...", arch.target());
        tools.wheel(*arch, &out)?;
        println!("release  the command for {} ...", arch.target());
        tools.archive(*arch, &out)?;
    }
    println!("release  crates, in the order in which they are published ...");
    crates(&out)?;
    write(&out, &format!("driftless-{VERSION}.cdx.json"), &format!("{:#}\n", bill_of_materials()?))?;
    write(&out, "NOTES.md", &notes(&read("CHANGELOG.md")?, options.sign_key.is_some())?)?;
    if let Some(key) = &options.sign_key {
        write(&out, SIGNERS, &signer(key)?)?;
    }
    sums(&out)?;
    if let Some(key) = &options.sign_key {
        sign(key, &out)?;
    }
    println!("release  {}", out.display());
    process::run(Command::new("ls").args(["-l", "--human-readable"]).arg(&out))
}

/// Makes a directory empty that is absent, empty, or was filled by this command, also if that did not end.
fn emptied(dir: &Path) -> Result<()> {
    if dir.exists() {
        let is_ours = dir.join(MARKER).is_file();
        if !is_ours && fs::read_dir(dir).map_err(Error::io(dir))?.next().is_some() {
            let expected = format!("a directory that is absent, empty, or has this command's {MARKER}");
            return Err(Error::check("--out", expected, dir.display().to_string()));
        }
        fs::remove_dir_all(dir).map_err(Error::io(dir))?;
    }
    fs::create_dir_all(dir).map_err(Error::io(dir))?;
    write(dir, MARKER, "")
}

struct Tools {
    home: PathBuf,
}

impl Tools {
    fn install(cache: &Path) -> Result<Self> {
        let home = cache.join(HOME);
        if !home.join("bin/cargo-zigbuild").exists() {
            println!("release  {} from PyPI (0.3 GB)", TOOLS.join(", "));
            install::wheels(&home, "bin/cargo-zigbuild", &TOOLS)?;
        }
        Ok(Tools { home })
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.home.join("bin").join(program));
        // Both start Zig as a module of Python.
        command.env("PYTHONPATH", &self.home).current_dir(workspace());
        command
    }

    fn wheel(&self, arch: Arch, out: &Path) -> Result<()> {
        add_target(arch)?;
        let mut build = self.command("maturin");
        build.args(["build", "--release", "--locked", "--zig", "--target", arch.target()]);
        build.args(["--compatibility", MANYLINUX, "--manifest-path", "python/Cargo.toml", "--out"]);
        process::run(build.arg(out))
    }

    /// The command with its manual, what shells complete it with, and its licence.
    fn archive(&self, arch: Arch, out: &Path) -> Result<()> {
        let target = format!("{}.{GLIBC}", arch.target());
        let mut build = self.command("cargo-zigbuild");
        build.args([
            "zigbuild",
            "--release",
            "--locked",
            "-p",
            "driftless",
            "--features",
            FEATURES,
            "--target",
        ]);
        process::run(build.arg(target))?;
        let name = format!("driftless-{VERSION}-{}", arch.target());
        let dir = target_dir().join("lanes").join(&name);
        if dir.exists() {
            fs::remove_dir_all(&dir).map_err(Error::io(&dir))?;
        }
        fs::create_dir_all(&dir).map_err(Error::io(&dir))?;
        let built = target_dir().join(arch.target()).join("release/driftless");
        copy(&built, &dir.join("driftless"))?;
        for file in ["LICENSE", "README.md", "CHANGELOG.md"] {
            copy(&workspace().join(file), &dir.join(file))?;
        }
        if arch.target().starts_with(std::env::consts::ARCH) {
            manual(&built, &dir)?;
        }
        let archive = out.join(format!("{name}.tar.gz"));
        let mut tar = Command::new("tar");
        tar.args(["--owner=0", "--group=0", "--sort=name", "-C"]).arg(target_dir().join("lanes"));
        process::run(tar.arg("-czf").arg(archive).arg(name))
    }
}

/// What the command says of itself, where it runs.
fn manual(program: &Path, dir: &Path) -> Result<()> {
    process::run(Command::new(program).arg("man").arg(dir.join("man1")))?;
    let completions = dir.join("completions");
    fs::create_dir_all(&completions).map_err(Error::io(&completions))?;
    for shell in ["bash", "zsh", "fish"] {
        let script = process::output(Command::new(program).args(["completions", shell]))?;
        write(&completions, &format!("driftless.{shell}"), &script)?;
    }
    Ok(())
}

fn add_target(arch: Arch) -> Result<()> {
    process::run(Command::new("rustup").args(["target", "add", arch.target()]).current_dir(workspace()))
}

/// Packs the crates as a publication would, and sends none. `cargo publish --workspace` is what sends them.
fn crates(out: &Path) -> Result<()> {
    let dir = out.join("crates");
    fs::create_dir_all(&dir).map_err(Error::io(&dir))?;
    let copied = |file: PathBuf| copy(&file, &dir.join(file.file_name().unwrap_or_default()));
    pack(&target_dir(), &["--locked", "--quiet"], process::run)?.into_iter().try_for_each(copied)
}

/// Has `run` pack what would be published into this target directory, sends nothing, and returns a file of each crate.
pub(crate) fn pack(
    target: &Path,
    more: &[&str],
    run: impl FnOnce(&mut Command) -> Result<()>,
) -> Result<Vec<PathBuf>> {
    // Cargo keeps what a dry run packs there, and removes none.
    let dir = target.join("package/tmp-crate");
    if dir.exists() {
        fs::remove_dir_all(&dir).map_err(Error::io(&dir))?;
    }
    let mut cargo = Command::new("cargo");
    cargo.args(["publish", "--workspace", "--dry-run", "--no-verify"]).args(more);
    run(cargo.arg("--target-dir").arg(target).current_dir(workspace()))?;
    let mut metadata = Command::new("cargo");
    metadata.args(["metadata", "--format-version", "1", "--no-deps"]).current_dir(workspace());
    let metadata = process::json(&mut metadata)?;
    let published = metadata["packages"].as_array().into_iter().flatten();
    let names =
        published.filter(|package| package["publish"] != json!([])).filter_map(|p| p["name"].as_str());
    let all: Vec<_> = names.map(|name| dir.join(format!("{name}-{VERSION}.crate"))).collect();
    match all.iter().find(|file| !file.is_file()) {
        Some(missing) => {
            Err(Error::check("cargo publish --dry-run", missing.display().to_string(), "no such file"))
        }
        None => Ok(all),
    }
}

/// What the command consists of, in CycloneDX. The wheels have theirs inside.
fn bill_of_materials() -> Result<serde_json::Value> {
    let mut cargo = Command::new("cargo");
    cargo.args(["tree", "--locked", "-p", "driftless", "--features", FEATURES, "-e", "normal,build"]);
    cargo.args(["--prefix", "none", "--format", "{p}|{l}"]).current_dir(workspace());
    let components: Vec<_> = components(&process::output(&mut cargo)?)
        .into_iter()
        .map(|((name, version), licence)| {
            let purl = format!("pkg:cargo/{name}@{version}");
            json!({"type": "library", "name": name, "version": version, "purl": purl,
                "licenses": [{"expression": licence.replace('/', " OR ")}]})
        })
        .collect();
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "driftless", "version": VERSION}},
        "components": components,
    }))
}

/// Names and versions with their licences, of lines such as `adler2 v2.0.1|MIT (*)`.
fn components(tree: &str) -> BTreeMap<(String, String), String> {
    let component = |line: &str| {
        let (package, licence) = line.split_once('|')?;
        let mut words = package.split_whitespace();
        let (name, version) = (words.next()?, words.next()?.strip_prefix('v')?);
        let licence = licence.trim_end_matches("(*)").trim();
        Some(((name.to_owned(), version.to_owned()), licence.to_owned()))
    };
    tree.lines().filter_map(component).collect()
}

/// What the changelog says of this version, and how the files are checked.
fn notes(changelog: &str, is_signed: bool) -> Result<String> {
    let title = format!("## {VERSION}");
    let begins = |line: &str| line == title || line.starts_with(&format!("{title} "));
    let section: Vec<&str> = changelog
        .lines()
        .skip_while(|line| !begins(line))
        .enumerate()
        .take_while(|(at, line)| *at == 0 || !line.starts_with("## "))
        .map(|(_, line)| line)
        .collect();
    if section.is_empty() {
        return Err(Error::check("CHANGELOG.md", format!("a section `{title}`"), "none"));
    }
    let mut notes = format!(
        "{}\n\n## Check what you downloaded\n\n    sha256sum --check SHA256SUMS\n",
        section.join("\n").trim()
    );
    if is_signed {
        notes += &format!(
            "    ssh-keygen -Y verify -f {SIGNERS} -I {NAMESPACE} -n {NAMESPACE} -s {SUMS}.sig < {SUMS}\n\n\
             The key in `{SIGNERS}` has to be the one of the releases before, or one that you have from elsewhere: whoever \
             changes these files can change that one too.\n"
        );
    } else {
        notes += "\nThese checksums are not signed.\n";
    }
    Ok(notes)
}

fn sums(out: &Path) -> Result<()> {
    let mut all = files(out)?;
    all.retain(|file| ![SUMS, MARKER].iter().any(|name| file == Path::new(name)));
    all.extend(files(&out.join("crates"))?.into_iter().map(|file| Path::new("crates").join(file)));
    let sums = process::output(Command::new("sha256sum").args(all).current_dir(out))?;
    write(out, SUMS, &sums)
}

/// The line for the public half of this key.
fn signer(key: &Path) -> Result<String> {
    let public = process::output(Command::new("ssh-keygen").args(["-y", "-f"]).arg(key))?;
    let mut words = public.split_whitespace();
    match (words.next(), words.next()) {
        (Some(kind), Some(public)) => Ok(format!("{NAMESPACE} namespaces=\"{NAMESPACE}\" {kind} {public}\n")),
        _ => Err(Error::check("ssh-keygen -y", "a kind and a key", public)),
    }
}

fn sign(key: &Path, out: &Path) -> Result<()> {
    let mut sign = Command::new("ssh-keygen");
    sign.args(["-Y", "sign", "-n", NAMESPACE, "-f"]).arg(key).arg(out.join(SUMS));
    process::run(&mut sign)
}

/// The names of the files of a directory, sorted.
fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(Error::io(dir))? {
        let path = entry.map_err(Error::io(dir))?.path();
        names.extend(path.file_name().filter(|_| path.is_file()).map(PathBuf::from));
    }
    names.sort();
    Ok(names)
}

fn read(file: &str) -> Result<String> {
    let path = workspace().join(file);
    fs::read_to_string(&path).map_err(Error::io(&path))
}

fn write(dir: &Path, name: &str, text: &str) -> Result<()> {
    let path = dir.join(name);
    fs::write(&path, text).map_err(Error::io(&path))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).map(drop).map_err(Error::io(from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_are_told_once_with_their_licences() {
        let found = components("a v1.0.0|MIT\nb v2.0.0 (/path)|Apache-2.0\na v1.0.0|MIT (*)\n\n[build]\n");
        let found: Vec<_> =
            found.into_iter().map(|((name, version), licence)| (name, version, licence)).collect();
        let expected = [("a", "1.0.0", "MIT"), ("b", "2.0.0", "Apache-2.0")];
        assert_eq!(found, expected.map(|(a, b, c)| (a.to_owned(), b.to_owned(), c.to_owned())));
    }

    fn directory(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("driftless-release-{name}-{}", std::process::id()))
    }

    #[test]
    fn directory_of_something_else_is_not_emptied() {
        let out = directory("emptied");
        emptied(&out).unwrap();
        write(&out, "half.whl", "").unwrap();
        emptied(&out).unwrap();
        assert_eq!(files(&out).unwrap(), [PathBuf::from(MARKER)]);
        // What somebody has downloaded has checksums, and no marker.
        fs::remove_file(out.join(MARKER)).unwrap();
        write(&out, SUMS, "").unwrap();
        write(&out, "thesis.tex", "").unwrap();
        assert!(emptied(&out).unwrap_err().to_string().contains(MARKER));
        assert!(out.join("thesis.tex").is_file());
        fs::remove_dir_all(&out).unwrap();
    }

    #[test]
    fn signature_is_verified_as_the_notes_say() {
        let out = directory("signed");
        emptied(&out).unwrap();
        fs::create_dir(out.join("crates")).unwrap();
        let key = directory("key");
        let mut made = Command::new("ssh-keygen");
        process::run(made.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&key)).unwrap();
        write(&out, "driftless.whl", "a wheel").unwrap();
        write(&out, SIGNERS, &signer(&key).unwrap()).unwrap();
        sums(&out).unwrap();
        sign(&key, &out).unwrap();
        assert!(!fs::read_to_string(out.join(SUMS)).unwrap().contains(MARKER), "it goes to nobody");
        let notes = notes(&format!("## {VERSION}\n\n- this\n"), true).unwrap();
        let commands: Vec<_> = notes.lines().filter_map(|line| line.strip_prefix("    ")).collect();
        assert_eq!(commands.len(), 2, "{notes}");
        let script = format!("set -e\n{}", commands.join("\n"));
        let check = || Command::new("sh").args(["-c", &script]).current_dir(&out).output().unwrap();
        let said = check();
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        // A file and its checksum that were changed together.
        write(&out, "driftless.whl", "another wheel").unwrap();
        let sums =
            process::output(Command::new("sha256sum").args(["driftless.whl"]).current_dir(&out)).unwrap();
        write(&out, SUMS, &sums).unwrap();
        assert!(!check().status.success());
        for path in [&key, &key.with_extension("pub")] {
            fs::remove_file(path).unwrap();
        }
        fs::remove_dir_all(&out).unwrap();
    }

    /// What the workflow runs to make a release, with `cargo` printing its arguments; what was printed.
    fn workflow(sign_key: &str) -> String {
        let text = read(".github/workflows/release.yml").unwrap();
        let step = text.split("- name: files").nth(1).unwrap();
        let script = step.split("run: |\n").nth(1).unwrap();
        let lines = script.lines().take_while(|line| line.starts_with("          ")).map(str::trim_start);
        let script =
            format!("cargo() {{ echo \"cargo $*\"; }}\nset -e\n{}", lines.collect::<Vec<_>>().join("\n"));
        let dir = directory(&format!("workflow-{}", sign_key.len()));
        fs::create_dir_all(dir.join("release-files")).unwrap();
        fs::write(dir.join("release-files/NOTES.md"), "what is new\n").unwrap();
        let mut run = Command::new("bash");
        run.args(["-c", &script]).current_dir(&dir).env("SIGN_KEY", sign_key).env("RUNNER_TEMP", &dir);
        let said = run.env("GITHUB_STEP_SUMMARY", dir.join("summary")).output().unwrap();
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        assert_eq!(fs::read_to_string(dir.join("summary")).unwrap(), "what is new\n");
        assert!(!dir.join("sign-key").exists(), "the key does not stay");
        fs::remove_dir_all(&dir).unwrap();
        String::from_utf8(said.stdout).unwrap()
    }

    #[test]
    fn workflow_signs_with_the_secret_or_says_that_it_does_not() {
        let said = workflow("a key");
        assert!(said.contains("cargo xtask release --out release-files --sign-key "), "{said}");
        assert!(!said.contains("::warning"), "{said}");
        let said = workflow("");
        assert!(said.contains("cargo xtask release --out release-files\n"), "{said}");
        assert!(said.contains("::warning") && said.contains("RELEASE_SIGN_KEY"), "{said}");
    }

    #[test]
    fn notes_are_those_of_this_version_or_none() {
        let changelog = format!(
            "# Changelog\n\n## 9.9.9\n\n- newer\n\n## {VERSION} (unreleased)\n\n- this\n\n## 0.0.1\n\n- older\n"
        );
        let notes = super::notes(&changelog, true).unwrap();
        assert!(notes.contains("- this") && notes.contains("SHA256SUMS.sig"), "{notes}");
        assert!(!notes.contains("newer") && !notes.contains("older"), "{notes}");
        assert!(super::notes("# Changelog\n", false).is_err());
        let unsigned = super::notes(&changelog, false).unwrap();
        assert!(!unsigned.contains("ssh-keygen") && unsigned.contains("not signed"), "{unsigned}");
    }
}
