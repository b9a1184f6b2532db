//! SIGBUS, by which the kernel says that a page of a memory-mapped file cannot be read or written. The
//! command names the file, as it does for any other failure of a file, and ends with code 1.
#![expect(unsafe_code, reason = "a signal handler")]

use rustix::fs::{Mode, OFlags};
use std::ffi::c_int;
use std::io::stderr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A line of `/proc/self/maps` is shorter: a path has at most 4,096 bytes.
const LINE_BYTES_MAX: usize = 8 << 10;

/// From here on a page that cannot be read or written is an error in words.
pub(crate) fn name_unreadable_files() {
    // SAFETY: all zeros are a valid `sigaction`: no handler, no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut libc::c_void) = report;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the action is valid and outlives the call, and its handler makes system calls only, which
    // handlers may.
    unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
}

/// Whether a thread is reporting.
static REPORTING: AtomicBool = AtomicBool::new(false);

extern "C" fn report(_: c_int, information: *mut libc::siginfo_t, _: *mut libc::c_void) {
    while REPORTING.swap(true, Relaxed) {
        // SAFETY: sleeps until a signal. The thread that reports ends the process.
        unsafe { libc::pause() };
    }
    // SAFETY: with `SA_SIGINFO` the kernel passes a valid pointer, and SIGBUS comes with an address.
    let address = unsafe { (*information).si_addr() } as usize;
    let mut buffer = [0; LINE_BYTES_MAX];
    let Some(path) = mapped_at(address, &mut buffer) else {
        // SAFETY: the access is repeated after the return, and ends the process as it does without a handler.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
        return;
    };
    for part in ["error: cannot read or write a page of `", path, "`, which is mapped into memory\n", HINT] {
        // Whoever does not listen is not told.
        let _ = rustix::io::write(stderr(), part.as_bytes());
    }
    // SAFETY: ends the process at once, without anything that would have to be unwound.
    unsafe { libc::_exit(1) }
}

const HINT: &str = "  hint: its disk fails or is full, or another program cut the file short\n";

/// The file that is mapped at `address`. Allocates nothing and takes no lock.
fn mapped_at(address: usize, buffer: &mut [u8; LINE_BYTES_MAX]) -> Option<&str> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let maps = rustix::fs::open(c"/proc/self/maps", flags, Mode::empty()).ok()?;
    let mut filled = 0;
    let found = loop {
        match buffer[..filled].iter().position(|byte| *byte == b'\n') {
            Some(end) if is_at(&buffer[..end], address) => break end,
            Some(end) => {
                buffer.copy_within(end + 1..filled, 0);
                filled -= end + 1;
            }
            None => match rustix::io::read(&maps, &mut buffer[filled..]).ok()? {
                0 => return None,
                more => filled += more,
            },
        }
    };
    // `7f00-7f10 r--p 00000000 fe:00 1234    /path`
    let line = std::str::from_utf8(&buffer[..found]).ok()?;
    line.find('/').map(|path| &line[path..])
}

/// Whether a line of `/proc/self/maps` is about `address`.
fn is_at(line: &[u8], address: usize) -> bool {
    let range = line.split(|byte| *byte == b' ').next().and_then(|range| std::str::from_utf8(range).ok());
    let ends = range.and_then(|range| range.split_once('-'));
    let ends = ends.map(|(begin, end)| (usize::from_str_radix(begin, 16), usize::from_str_radix(end, 16)));
    matches!(ends, Some((Ok(begin), Ok(end))) if (begin..end).contains(&address))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd as _;
    use std::process::Command;

    /// Names the file to the process that is to fail.
    const FILE: &str = "DRIFTLESS_TEST_MAPPED";

    #[test]
    fn page_that_is_cut_off_is_an_error_that_names_the_file() {
        if let Some(path) = std::env::var_os(FILE) {
            read_what_is_cut_off(&File::options().read(true).write(true).open(path).unwrap());
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        std::fs::write(&path, [7; 4096]).unwrap();
        let myself = std::env::current_exe().unwrap();
        let test = "cli::shared::mapped::tests::page_that_is_cut_off_is_an_error_that_names_the_file";
        let output = Command::new(myself).args(["--exact", test, "--nocapture"]).env(FILE, &path).output();
        let output = output.unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let expected = format!("error: cannot read or write a page of `{}`", path.display());
        assert!(said.contains(&expected), "{said}");
    }

    fn read_what_is_cut_off(file: &File) {
        super::name_unreadable_files();
        let (nowhere, access) = (std::ptr::null_mut(), libc::PROT_READ);
        // SAFETY: a new mapping touches nothing that is there.
        let page = unsafe { libc::mmap(nowhere, 4096, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_ne!(page, libc::MAP_FAILED);
        file.set_len(0).unwrap();
        // SAFETY: the page is mapped. Nothing is behind it, which ends the process.
        let byte = unsafe { std::ptr::read_volatile(page.cast::<u8>()) };
        panic!("read {byte}");
    }
}
