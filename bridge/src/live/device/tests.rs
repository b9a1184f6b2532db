//! A device whose memory is this process's, and whose kernels are `patch.cu` compiled for this processor.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use driftless_testkit::compiler::missing;

use super::*;
use crate::live::compare;
use crate::live::tests::Scene;

type Patch = unsafe extern "C" fn(u32, u64, u32, u32, u64);
type Checksum = unsafe extern "C" fn(u32, u64, u64, u64, u64);

/// The kernels; one runs at a time.
struct Kernels {
    _library: libloading::Library,
    patch: Patch,
    checksum: Checksum,
}

/// `None` where there is no C++ compiler.
fn kernels() -> Option<&'static Mutex<Kernels>> {
    static KERNELS: OnceLock<Option<Mutex<Kernels>>> = OnceLock::new();
    let compile = || {
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("twin.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/live/device/twin.cpp");
        let mut command = Command::new(&compiler);
        command.args(["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o"]).arg(&library).arg(source);
        let Ok(output) = command.output() else {
            missing(&format!("{compiler} does not run here; CXX names a C++ compiler"));
            return None;
        };
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // SAFETY: the library has no constructors; its functions are what its C++ says.
        Some(Mutex::new(unsafe {
            let library = libloading::Library::new(&library).unwrap();
            let patch = *library.get::<Patch>(b"twin_patch\0").unwrap();
            let checksum = *library.get::<Checksum>(b"twin_checksum\0").unwrap();
            Kernels { _library: library, patch, checksum }
        }))
    };
    KERNELS.get_or_init(compile).as_ref()
}

/// What a test does to a device, and sees of it.
#[derive(Default)]
struct Control {
    calls: AtomicUsize,
    drains: AtomicUsize,
    locked: AtomicUsize,
    locks: AtomicUsize,
    /// The launch of this number, counted from 1, fails.
    failing_launch: AtomicUsize,
    launches: AtomicUsize,
    /// Bytes that it has.
    memory: AtomicUsize,
    /// Copies and kernels that were begun, and whose end has not been waited for.
    under_way: AtomicUsize,
    /// Uploads and downloads that had to wait for some, and the engine's calls with them.
    held_up: AtomicUsize,
}

struct Twin(Arc<Control>);

impl Twin {
    fn begin(&self) {
        self.0.under_way.fetch_add(1, Ordering::Relaxed);
    }

    fn pageable(&self) {
        let under_way = self.0.under_way.load(Ordering::Relaxed);
        self.0.held_up.fetch_add(under_way.min(1), Ordering::Relaxed);
    }

    fn failed(what: &str) -> Error {
        Error::Live { what: what.into(), expected: "success".into(), found: "a test".into() }
    }
}

impl Machine for Twin {
    fn allocate(&self, bytes: u64) -> Result<u64> {
        let left = self.0.memory.load(Ordering::Relaxed);
        let Some(left) = left.checked_sub(bytes as usize) else { return Err(Self::failed("cuMemAlloc")) };
        self.0.memory.store(left, Ordering::Relaxed);
        // Full of rubbish, and there for good.
        Ok(Box::leak(vec![0xa5a5_5a5a_1234_5678_u64; bytes.div_ceil(8) as usize].into_boxed_slice()).as_ptr()
            as u64)
    }

    unsafe fn lock(&self, start: *mut u8, _: usize) -> Result<u64> {
        self.0.calls.fetch_add(1, Ordering::Relaxed);
        self.0.locks.fetch_add(1, Ordering::Relaxed);
        self.0.locked.fetch_add(1, Ordering::Relaxed);
        Ok(start as u64)
    }

    unsafe fn unlock(&self, _: *mut u8) {
        self.0.locked.fetch_sub(1, Ordering::Relaxed);
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<()> {
        self.begin();
        // SAFETY: the caller's promise.
        unsafe { (from as *const u8).copy_to_nonoverlapping(to as *mut u8, bytes as usize) };
        Ok(())
    }

    unsafe fn upload(&self, to: u64, words: &[u64]) -> Result<()> {
        self.0.calls.fetch_add(1, Ordering::Relaxed);
        self.pageable();
        // SAFETY: the caller's promise.
        unsafe { words.as_ptr().copy_to_nonoverlapping(to as *mut u64, words.len()) };
        Ok(())
    }

    unsafe fn launch(&self, kernel: Kernel, blocks: u32) -> Result<()> {
        self.begin();
        let number = self.0.launches.fetch_add(1, Ordering::Relaxed) + 1;
        if number == self.0.failing_launch.load(Ordering::Relaxed) {
            return Err(Self::failed("cuLaunchKernel"));
        }
        let kernels = kernels().unwrap().lock().unwrap();
        // SAFETY: the functions take what the kernels take; the rest is the caller's promise.
        unsafe {
            match kernel {
                Kernel::Patch { parts, count, task, results } => {
                    (kernels.patch)(blocks, parts, count, task, results)
                }
                Kernel::Checksum { words, start, count, results } => {
                    (kernels.checksum)(blocks, words, start, count, results);
                }
            }
        }
        Ok(())
    }

    fn finish(&self) -> Result<()> {
        self.0.under_way.store(0, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn download(&self, from: u64, words: &mut [u64]) -> Result<()> {
        self.pageable();
        // SAFETY: the caller's promise.
        unsafe { (from as *const u64).copy_to_nonoverlapping(words.as_mut_ptr(), words.len()) };
        Ok(())
    }

    fn drain(&self) -> Result<()> {
        self.0.drains.fetch_add(1, Ordering::Relaxed);
        self.finish()
    }
}

/// A scene on a device with an arena of so many bytes; `None` where the kernels cannot be compiled.
fn scene(arena: u64) -> Option<(Scene, Arc<Control>)> {
    kernels()?;
    let control = Arc::new(Control { memory: AtomicUsize::new(1 << 20), ..Control::default() });
    let machine = Twin(Arc::clone(&control));
    let scene = Scene::new(|layout| Box::new(Device::new(machine, layout, arena).unwrap()));
    Some((scene, control))
}

#[test]
fn patches_on_a_device_equal_those_on_the_host() {
    // With room for each delta, for none, and for small ones.
    for arena in [1 << 19, 0, 4 << 10] {
        let Some((mut scene, control)) = scene(arena) else { return };
        scene.assert_patches();
        assert_eq!(
            control.drains.load(Ordering::Relaxed),
            scene.patches,
            "a step in flight reads the weights"
        );
        assert_eq!(control.held_up.load(Ordering::Relaxed), 0, "the engine's calls would wait as well");
    }
}

#[test]
fn a_device_without_room_for_a_delta_reads_it_from_the_host() {
    let Some((mut scene, _)) = scene(1 << 40) else { return };
    scene.assert_patches();
}

#[test]
fn ranks_on_devices_write_together_or_not_at_all() {
    let Some((mut scene, _)) = scene(1 << 18) else { return };
    scene.assert_agrees();
}

#[test]
fn what_is_refused_on_the_host_is_refused_on_a_device() {
    let Some((mut scene, _)) = scene(1 << 18) else { return };
    scene.assert_refusals();
}

#[test]
fn a_device_compares_what_it_writes_as_the_host_does() {
    let Some((mut scene, _)) = scene(1 << 19) else { return };
    scene.assert_all_is_compared();
}

#[test]
fn a_device_compares_checkpoints_as_the_host_does() {
    // With room for what is compared, and without.
    for memory in [1 << 27, 1 << 20] {
        let Some((mut scene, control)) = scene(1 << 18) else { return };
        control.memory.store(memory, Ordering::Relaxed);
        compare::tests::assert_compares(&mut scene);
        assert_eq!(control.held_up.load(Ordering::Relaxed), 0, "the engine's calls would wait as well");
        // What is ready is not lost, nor is the room.
        scene.step(0.02);
        assert_eq!(scene.look(), None);
        compare::tests::compared(&scene, None).unwrap();
        assert!(scene.patch().unwrap().is_some());
        drop(scene);
        assert_eq!(control.locked.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn pages_stay_locked_while_the_file_is_the_same() {
    let Some((mut scene, control)) = scene(1 << 18) else { return };
    for _ in 0..3 {
        scene.step(0.02);
        scene.assert_patched();
    }
    assert_eq!(control.locks.load(Ordering::Relaxed), 1);
    scene.new_file();
    scene.step(0.02);
    scene.assert_patched();
    assert_eq!((control.locks.load(Ordering::Relaxed), control.locked.load(Ordering::Relaxed)), (2, 1));
    drop(scene);
    assert_eq!(control.locked.load(Ordering::Relaxed), 0);
}

#[test]
fn nothing_is_asked_of_a_device_before_a_version_is_live() {
    // The engine may be capturing graphs, which any call of another thread would spoil.
    let Some((mut scene, control)) = scene(1 << 18) else { return };
    scene.forget();
    let before = control.calls.load(Ordering::Relaxed);
    scene.step(0.02);
    assert!(scene.look().unwrap().contains("unknown"));
    assert_eq!(control.calls.load(Ordering::Relaxed), before);
}

#[test]
fn a_launch_that_fails_leaves_the_weights() {
    let Some((mut scene, control)) = scene(1 << 18) else { return };
    scene.step(0.02);
    assert_eq!(scene.look(), None);
    let before = scene.bytes();
    control.failing_launch.store(control.launches.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    assert!(scene.patch().unwrap_err().to_string().contains("cuLaunchKernel"));
    assert_eq!(scene.bytes(), before);
    assert!(matches!(scene.patch(), Ok(None)), "it is loaded next");
}

#[test]
fn kernels_have_the_names_and_the_layout_that_is_asked_for() {
    let ptx = include_str!("patch.ptx");
    assert!(ptx.contains(".visible .entry patch(") && ptx.contains(".visible .entry checksum("));
    assert!(!ptx.contains('\0'));
    assert_eq!(size_of::<Part>(), 24 * 8);
}
