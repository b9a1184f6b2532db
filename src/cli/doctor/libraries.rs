//! The build, and the libraries that it opens at run time.

use super::findings::{Finding, Group};
use super::{no_answer, within};
use crate::cli::VERSION;
use crate::cli::shared::output::short;
use driftless::bridge::nccl::Nccl;
use driftless::delta::cuda::{self, Driver};
use driftless::relay::fabric::ucx::{Ucx, UcxOptions};
use driftless::store::chain_text;
use indicatif::HumanBytes;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What a library may take to start: of a driver that hangs, nobody waits for the end.
const DEADLINE: Duration = Duration::from_secs(30);

/// What the system's loader looks for.
const NCCL: &str = "libnccl.so.2";

/// What NVIDIA's kernel driver makes.
const DEVICE_NODE: &str = "/dev/nvidiactl";
/// The release of that driver.
const DRIVER_RELEASE: &str = "/sys/module/nvidia/version";

/// CUDA's driver, as far as this process has it.
#[derive(Debug)]
enum Cuda {
    Absent,
    Broken(String),
    /// Its release, and name and bytes of each device.
    There([u32; 2], Vec<(String, u64)>),
}

/// What was found of libraries; of each that cannot be used, why.
#[derive(Debug)]
struct Facts {
    cuda: Cuda,
    /// Whether NVIDIA's kernel driver is loaded.
    node: bool,
    kernel_driver: Option<String>,
    compiler: Result<(), String>,
    nccl: Result<String, String>,
    ucx: Result<String, String>,
}

/// Looks for them; `nccl`: where an engine's environment has NCCL.
pub(super) fn look(nccl: Option<PathBuf>) -> Vec<Finding> {
    let build = Group("build");
    let torch = match cfg!(feature = "torch") {
        true => build.ok(
            "libtorch",
            "linked: `train` learns in this process; `serve`, `quantize` and `replay` are here",
        ),
        false => build.note(
            "libtorch",
            "not in this build: `train` wants a --learner, and `serve`, `quantize` and `replay` are not here",
            "if you need these: `cargo xtask setup`, then cargo install --locked --path . --features torch",
        ),
    };
    [build.ok("release", format!("driftless {VERSION}")), torch]
        .into_iter()
        .chain(judge(&read(nccl)))
        .collect()
}

fn read(nccl: Option<PathBuf>) -> Facts {
    let cuda = match within(DEADLINE, Driver::look) {
        None => Cuda::Broken(no_answer(DEADLINE, "libcuda.so.1")),
        Some(Ok(driver)) => Cuda::There(driver.version, driver.devices),
        Some(Err(cuda::Error::NoLibrary { .. })) => Cuda::Absent,
        Some(Err(error)) => Cuda::Broken(chain_text(&error)),
    };
    let library = nccl.unwrap_or_else(|| PathBuf::from(NCCL));
    let nccl = asked(NCCL, move || {
        let version = Nccl::open(&library, None)?.version().map(|number| number.to_string()).join(".");
        Ok::<_, driftless::bridge::Error>(format!("{version} ({})", library.display()))
    });
    Facts {
        cuda,
        node: Path::new(DEVICE_NODE).exists(),
        kernel_driver: std::fs::read_to_string(DRIVER_RELEASE).ok().map(|text| short(text.trim())),
        compiler: asked("libnvrtc", cuda::compiler),
        nccl,
        ucx: asked("libucp.so.0", || Ucx::open(&UcxOptions::default()).map(|ucx| ucx.version())),
    }
}

fn asked<T, E>(library: &str, ask: impl FnOnce() -> Result<T, E> + Send + 'static) -> Result<T, String>
where
    T: Send + 'static,
    E: std::error::Error + Send + 'static,
{
    let told = within(DEADLINE, || ask().map_err(|error| chain_text(&error)));
    told.unwrap_or_else(|| Err(no_answer(DEADLINE, library)))
}

fn judge(facts: &Facts) -> Vec<Finding> {
    let group = Group("libraries");
    let has_devices = matches!(&facts.cuda, Cuda::There(_, devices) if !devices.is_empty());
    let compiler = match &facts.compiler {
        Ok(()) => group.ok("nvrtc", "there: tensors on a GPU are encoded there"),
        Err(_) if !has_devices => group.ok("nvrtc", "not there; nothing wants it without a GPU"),
        Err(why) => {
            let what = "published tensors are copied to the host and encoded there";
            let advice =
                "pip install nvidia-cuda-nvrtc, and its lib in LD_LIBRARY_PATH; PyTorch brings it too";
            group.note("nvrtc", format!("{why}; {what}"), advice)
        }
    };
    let nccl = match &facts.nccl {
        Ok(found) => group.ok("NCCL", found),
        Err(_) if !has_devices => group.ok("NCCL", "not there; nothing wants it without a GPU"),
        Err(why) => group.note(
            "NCCL",
            format!("not found by the loader: {why}"),
            "to push over NCCL, give --nccl-library the libnccl.so.2 of the engines' torch; --python finds it here",
        ),
    };
    let ucx = match &facts.ucx {
        Ok(version) => group.ok("UCX", format!("{version}; `ucx_info -d` shows its transports")),
        Err(why) => group.note(
            "UCX",
            format!("ucx:// relays and --listen-ucx cannot be used: {}", short(why)),
            "if you want these, see \"Move bytes over UCX\" in docs/transports.md",
        ),
    };
    vec![cuda(facts, group), compiler, nccl, ucx]
}

fn cuda(facts: &Facts, group: Group) -> Finding {
    let advice = "in a container, start it with --gpus all; else look at `nvidia-smi`, and start the host again if its \
                  driver was updated";
    match &facts.cuda {
        Cuda::There([major, minor], devices) if devices.is_empty() => group.note(
            "CUDA",
            format!("the driver has CUDA {major}.{minor}, and shows this process no device"),
            "nothing without a GPU; otherwise look at CUDA_VISIBLE_DEVICES and, in a container, --gpus",
        ),
        Cuda::There([major, minor], devices) => {
            let driver = facts.kernel_driver.as_ref().map_or_else(String::new, |it| format!(", driver {it}"));
            group.ok("CUDA", format!("{major}.{minor}{driver}: {}", listed(devices)))
        }
        Cuda::Absent if facts.node => {
            group.problem("CUDA", "NVIDIA's kernel driver is loaded, and there is no libcuda.so.1", advice)
        }
        Cuda::Absent => group.note(
            "CUDA",
            "no libcuda.so.1: nothing here can use a GPU",
            "nothing without a GPU; otherwise install the NVIDIA driver",
        ),
        Cuda::Broken(why) => group.problem("CUDA", format!("libcuda.so.1 is there and fails: {why}"), advice),
    }
}

/// Devices, with equal neighbours counted.
fn listed(devices: &[(String, u64)]) -> String {
    let alike = devices.chunk_by(|one, other| one == other);
    let shown = alike.filter_map(|alike| {
        let (name, bytes) = alike.first()?;
        Some(format!("{} × {} ({})", alike.len(), short(name), HumanBytes(*bytes)))
    });
    shown.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::findings::State;
    use super::*;

    fn found(cuda: Cuda, node: bool) -> Vec<Finding> {
        let missing = || Err("no such file".to_owned());
        judge(&Facts {
            cuda,
            node,
            kernel_driver: Some("580.65".into()),
            compiler: Err("no libnvrtc".into()),
            nccl: missing(),
            ucx: missing(),
        })
    }

    #[test]
    fn host_without_gpu_lacks_nothing_but_may_want_ucx() {
        let findings = found(Cuda::Absent, false);
        let states: Vec<_> = findings.iter().map(|finding| finding.state).collect();
        assert_eq!(states, [State::Note, State::Ok, State::Ok, State::Note]);
        assert!(
            findings[0].advice.as_ref().is_some_and(|advice| advice.starts_with("nothing without a GPU"))
        );
    }

    #[test]
    fn devices_are_listed_and_miss_what_they_want() {
        let gpu = || ("NVIDIA H100 80GB HBM3\u{1b}".to_owned(), 80 << 30);
        let findings = found(Cuda::There([13, 0], vec![gpu(), gpu(), ("L4".to_owned(), 24 << 30)]), true);
        let shown = &findings[0].found;
        assert!(
            shown.starts_with("13.0, driver 580.65: 2 × NVIDIA H100 80GB HBM3  (80.00 GiB), 1 × L4"),
            "{shown}"
        );
        let states: Vec<_> = findings.iter().map(|finding| finding.state).collect();
        assert_eq!(states, [State::Ok, State::Note, State::Note, State::Note]);
        assert!(findings[1].found.contains("encoded there") && findings[2].advice.is_some(), "{findings:?}");
    }

    #[test]
    fn driver_that_is_half_there_is_a_problem() {
        for (cuda, node) in [(Cuda::Absent, true), (Cuda::Broken("system not yet initialized".into()), true)]
        {
            let finding = found(cuda, node).remove(0);
            assert_eq!(finding.state, State::Problem);
            assert!(finding.advice.is_some_and(|advice| advice.contains("--gpus all")));
        }
        assert_eq!(found(Cuda::There([12, 4], Vec::new()), false)[0].state, State::Note);
    }
}
