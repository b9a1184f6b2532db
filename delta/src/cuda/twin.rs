//! A machine that is this processor: the kernels compiled as C++ (`kernels/twin.cpp`), for tests without a
//! device.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::device::definitions;
use super::machine::{Arguments, Grid, Kernel, Machine, Memory, Pinned};
use super::{Error, Result};
use crate::element::Element;

type Launch = unsafe extern "C" fn(*const c_char, c_uint, c_uint, *mut c_void) -> c_int;

/// The C++ compiler.
const COMPILER: &str = match option_env!("CXX") {
    Some(compiler) => compiler,
    None => "c++",
};

/// The kernels for one element type, in this process.
pub(super) struct Compiled {
    _library: libloading::Library,
    launch: Launch,
}

/// Compiles the kernels for an element type, the first time that it is asked for. They keep state: one runs
/// at a time.
///
/// # Errors
/// [`Error::Compile`], where there is no C++ compiler for instance.
pub(super) fn compiled(element: Element) -> Result<MutexGuard<'static, HashMap<Element, Compiled>>> {
    static COMPILED: OnceLock<Mutex<HashMap<Element, Compiled>>> = OnceLock::new();
    let mut all = COMPILED.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    if let Entry::Vacant(vacant) = all.entry(element) {
        let log = |log: String| Error::Compile { architecture: "this processor".to_owned(), log };
        vacant.insert(compile(element).map_err(log)?);
    }
    Ok(all)
}

fn compile(element: Element) -> std::result::Result<Compiled, String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let library = folder.path().join("twin.so");
    let output = Command::new(COMPILER)
        .args(["-std=c++17", "-O2", "-w", "-shared", "-fPIC", "-ffp-contract=off"])
        // longjmp between stacks is what it does for a living.
        .args(["-U_FORTIFY_SOURCE", "-fcf-protection=none", "-o"])
        .arg(&library)
        .args(definitions(element))
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda/kernels/twin.cpp"))
        .output()
        .map_err(|error| format!("{COMPILER} does not run here ({error}); CXX named it at build time"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    // SAFETY: the library has no constructors; `twin_launch` is what its C++ says, and lives as long as the
    // library.
    let loaded = unsafe {
        libloading::Library::new(&library).and_then(|library| {
            let launch = *library.get::<Launch>(b"twin_launch\0")?;
            Ok(Compiled { _library: library, launch })
        })
    };
    loaded.map_err(|error| error.to_string())
}

/// Does everything at once, on the caller's thread. Its memory is full of rubbish at first.
pub(super) struct Twin {
    ordinal: usize,
    /// Bytes that are left to be allocated.
    left: Arc<AtomicUsize>,
}

impl Twin {
    /// Device `ordinal`, with so many bytes of memory.
    pub(super) fn new(ordinal: usize, bytes: usize) -> Self {
        Self { ordinal, left: Arc::new(AtomicUsize::new(bytes)) }
    }
}

/// Memory of a twin, which it gets back.
struct Taken {
    words: Box<[u128]>,
    left: Arc<AtomicUsize>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.left.fetch_add(16 * self.words.len(), Ordering::Relaxed);
    }
}

impl Machine for Twin {
    fn ordinal(&self) -> usize {
        self.ordinal
    }

    fn enter(&self) -> Result<()> {
        Ok(())
    }

    fn prepare(&self, element: Element) -> Result<()> {
        compiled(element).map(drop)
    }

    fn fork(&self) -> Result<Box<dyn Machine>> {
        Ok(Box::new(Self { ordinal: self.ordinal, left: Arc::clone(&self.left) }))
    }

    fn allocate(&self, bytes: usize) -> Result<Memory> {
        let words = bytes.max(1).div_ceil(16);
        let take = |left: usize| left.checked_sub(16 * words);
        if self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_err() {
            let what = format!("allocating {bytes} bytes on device {}", self.ordinal);
            return Err(Error::Driver { what, why: "out of memory".to_owned() });
        }
        let words = vec![0xa5a5_5a5a_1234_5678_9abc_def0_c3c3_3c3c; words].into_boxed_slice();
        let address = words.as_ptr() as u64;
        Ok(Memory::new(address, Taken { words, left: Arc::clone(&self.left) }))
    }

    fn pinned(&self, bytes: usize) -> Result<Pinned> {
        let bytes = bytes.max(1);
        let mut words = vec![0xa5a5_5a5a_1234_5678_9abc_def0_c3c3_3c3c_u128; bytes.div_ceil(16)];
        // SAFETY: the words have that many bytes, and stay where they are when the vector moves.
        Ok(unsafe { Pinned::new(words.as_mut_ptr().cast(), bytes, words) })
    }

    fn emitters(&self) -> usize {
        2
    }

    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { (address as *mut u8).write_bytes(0, bytes) };
        Ok(())
    }

    unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { from.as_ptr().copy_to_nonoverlapping(to as *mut u8, from.len()) };
        Ok(())
    }

    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { (from as *const u8).copy_to_nonoverlapping(to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { (from as *const u8).copy_to_nonoverlapping(to as *mut u8, bytes) };
        Ok(())
    }

    unsafe fn launch(
        &self,
        element: Element,
        kernel: Kernel,
        grid: Grid,
        arguments: &dyn Arguments,
    ) -> Result<()> {
        let all = compiled(element)?;
        let name = CString::new(kernel.name()).unwrap_or_default();
        let arguments = std::ptr::from_ref(arguments).cast_mut().cast();
        let launch = all.get(&element).map(|compiled| compiled.launch);
        // SAFETY: the kernel takes one argument of that layout, and copies it; the rest is the caller's
        // promise.
        let known = launch
            .map(|launch| unsafe { launch(name.as_ptr(), grid.blocks as c_uint, grid.threads, arguments) });
        assert_eq!(known, Some(0), "{}", kernel.name());
        Ok(())
    }

    fn finish(&self) -> Result<()> {
        Ok(())
    }
}
