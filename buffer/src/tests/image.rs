//! A simulated medium: files with a live state (what a process sees) and a durable one (what survives a power
//! cut).
//!
//! Pages reach the durable state one by one. A flush stores the dirty ones among those it names. A crash may
//! have stored any subset of the others, each in any state that it had since it was last stored.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use crate::layout::segment::HEADER_PAGE;
use crate::map::Map;
use crate::storage::{SPARE, Storage};

/// Bytes that reach the medium together.
const PAGE: usize = 4096;

#[repr(C, align(4096))]
#[derive(Debug)]
struct Page([AtomicU64; PAGE / 8]);

/// One simulated segment file.
#[derive(Debug)]
pub(crate) struct Image {
    live: Vec<Page>,
    pages: Mutex<Vec<Stored>>,
    medium: Weak<Inner>,
}

/// What is known of one page beyond its live bytes.
#[derive(Debug, Clone)]
struct Stored {
    durable: Vec<u8>,
    dirty: bool,
    /// Distinct states since the last flush, oldest first.
    history: Vec<Vec<u8>>,
}

impl Image {
    fn new(bytes: &[u8], medium: &Arc<Inner>) -> Arc<Self> {
        let page = |bytes: &[u8]| {
            let page = Page([const { AtomicU64::new(0) }; PAGE / 8]);
            // Most are empty, and Miri takes its time for each word.
            if bytes != [0; PAGE] {
                let values = bytes.as_chunks().0.iter().map(|value| u64::from_ne_bytes(*value));
                page.0.iter().zip(values).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
            }
            page
        };
        let stored = |bytes: &[u8]| Stored { durable: bytes.to_vec(), dirty: false, history: Vec::new() };
        Arc::new(Self {
            live: bytes.chunks(PAGE).map(page).collect(),
            pages: Mutex::new(bytes.chunks(PAGE).map(stored).collect()),
            medium: Arc::downgrade(medium),
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.live.len() * PAGE
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.live.as_ptr().cast_mut().cast()
    }

    fn page(&self, index: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(PAGE);
        // Not by an iterator over the bytes, which Miri takes minutes for.
        for word in &self.live[index].0 {
            bytes.extend_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        bytes
    }

    /// Marks the pages of `range` dirty.
    pub(crate) fn written(&self, range: Range<usize>) {
        let mut pages = self.pages.lock().unwrap();
        for page in &mut pages[range.start / PAGE..range.end.div_ceil(PAGE)] {
            page.dirty = true;
        }
    }

    /// Notes the present state of every dirty page as one that a crash may leave behind.
    fn observe(&self) {
        let mut pages = self.pages.lock().unwrap();
        for (index, page) in pages.iter_mut().enumerate().filter(|(_, page)| page.dirty) {
            let live = self.page(index);
            if live != page.durable && page.history.last() != Some(&live) {
                page.history.push(live);
            }
        }
    }

    pub(crate) fn flush(&self, range: Range<usize>) -> io::Result<()> {
        let medium = self.medium.upgrade().unwrap();
        let meanwhile = medium.calls.lock().unwrap().meanwhile.take();
        if let Some(Meanwhile(happens)) = meanwhile {
            happens();
        }
        let failed = medium.called("flush");
        let mut pages = self.pages.lock().unwrap();
        for index in range.start / PAGE..range.end.div_ceil(PAGE) {
            let page = &mut pages[index];
            // A failed flush is as bad as Linux makes it: nothing is stored and the pages count as clean.
            if page.dirty && failed.is_ok() {
                page.durable = self.page(index);
            }
            page.dirty = false;
            page.history.clear();
        }
        failed
    }

    /// Zeroes bytes in both states, as a punched hole does.
    fn punch(&self, range: Range<usize>) {
        let mut pages = self.pages.lock().unwrap();
        for index in range.start / PAGE..range.end / PAGE {
            self.live[index].0.iter().for_each(|word| word.store(0, Ordering::Relaxed));
            pages[index] = Stored { durable: vec![0; PAGE], dirty: false, history: Vec::new() };
        }
    }
}

#[derive(Debug, Clone)]
enum File {
    Segment(Arc<Image>),
    Small(Vec<u8>),
}

/// The simulated medium.
#[derive(Debug, Clone)]
pub(crate) struct Medium(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    files: Mutex<BTreeMap<String, File>>,
    calls: Mutex<Calls>,
}

#[derive(Debug, Default)]
struct Calls {
    count: usize,
    /// The call that fails, and how.
    fail: Option<(usize, io::ErrorKind)>,
    /// Crash states, when they are wanted.
    crashes: Option<Vec<Crash>>,
    /// What the workload has been promised so far; copied into every crash state.
    promised: Vec<u64>,
    /// What happens while the next flush is under way.
    meanwhile: Option<Meanwhile>,
}

struct Meanwhile(Box<dyn FnOnce() + Send>);

impl std::fmt::Debug for Meanwhile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Meanwhile")
    }
}

/// What a power cut at one moment may leave: per segment and page, every state it may be in, the durable one
/// first.
#[derive(Debug, Clone)]
pub(crate) struct Crash {
    pub(crate) at: &'static str,
    pub(crate) promised: Vec<u64>,
    segments: BTreeMap<String, Vec<Vec<Vec<u8>>>>,
    small: BTreeMap<String, Vec<u8>>,
}

impl Crash {
    /// How many pages are in more than one possible state.
    pub(crate) fn open_pages(&self) -> usize {
        self.segments.values().flatten().filter(|states| states.len() > 1).count()
    }

    /// The medium after the crash: `choose(page, states)` picks the state of the n-th open page.
    pub(crate) fn leave(&self, mut choose: impl FnMut(usize, usize) -> usize) -> Medium {
        let medium = Medium::new();
        let mut open = 0;
        for (name, pages) in &self.segments {
            let mut bytes = Vec::new();
            for states in pages {
                let choice = if states.len() > 1 { choose(open, states.len()) } else { 0 };
                open += usize::from(states.len() > 1);
                bytes.extend_from_slice(&states[choice]);
            }
            medium.insert(name, &bytes);
        }
        let small = self.small.iter().map(|(name, bytes)| (name.clone(), File::Small(bytes.clone())));
        medium.0.files.lock().unwrap().extend(small);
        medium
    }
}

impl Medium {
    pub(crate) fn new() -> Self {
        let (files, calls) = (Mutex::default(), Mutex::default());
        Self(Arc::new(Inner { files, calls }))
    }

    /// Puts a segment file of these bytes, durable.
    pub(crate) fn insert(&self, name: &str, bytes: &[u8]) {
        let image = Image::new(bytes, &self.0);
        self.0.files.lock().unwrap().insert(name.to_owned(), File::Segment(image));
    }

    /// Makes the `k`-th call from now fail.
    pub(crate) fn fail(&self, k: usize, kind: io::ErrorKind) {
        let mut calls = self.0.calls.lock().unwrap();
        calls.fail = Some((calls.count + k, kind));
    }

    /// Has this happen while the next flush is under way.
    #[cfg(not(loom))]
    pub(crate) fn meanwhile(&self, happens: impl FnOnce() + Send + 'static) {
        self.0.calls.lock().unwrap().meanwhile = Some(Meanwhile(Box::new(happens)));
    }

    /// From now on, keeps every state that a crash could leave.
    pub(crate) fn record_crashes(&self) {
        self.0.calls.lock().unwrap().crashes = Some(Vec::new());
    }

    pub(crate) fn crashes(&self) -> Vec<Crash> {
        self.0.calls.lock().unwrap().crashes.take().unwrap_or_default()
    }

    /// The state that a crash right now could leave.
    pub(crate) fn crash(&self) -> Crash {
        let promised = self.0.calls.lock().unwrap().promised.clone();
        self.0.crash("now", promised)
    }

    /// Notes what the workload has been promised: positions of acknowledged records.
    pub(crate) fn promise(&self, position: u64) {
        self.0.calls.lock().unwrap().promised.push(position);
    }

    /// Notes the present state of all pages as one that may survive.
    pub(crate) fn observe(&self) {
        for file in self.0.files.lock().unwrap().values() {
            if let File::Segment(image) = file {
                image.observe();
            }
        }
    }
}

impl Inner {
    /// Every call to the medium passes here: the place where it fails, or the power goes.
    fn called(&self, what: &'static str) -> io::Result<()> {
        let mut calls = self.calls.lock().unwrap();
        calls.count += 1;
        if calls.crashes.is_some() {
            let crash = self.crash(what, calls.promised.clone());
            calls.crashes.as_mut().unwrap().push(crash);
        }
        match calls.fail {
            Some((k, kind)) if k == calls.count => Err(kind.into()),
            _ => Ok(()),
        }
    }

    fn crash(&self, at: &'static str, promised: Vec<u64>) -> Crash {
        let mut crash = Crash { at, promised, segments: BTreeMap::new(), small: BTreeMap::new() };
        for (name, file) in &*self.files.lock().unwrap() {
            match file {
                File::Small(bytes) => drop(crash.small.insert(name.clone(), bytes.clone())),
                File::Segment(image) => {
                    image.observe();
                    let states = |page: &Stored| {
                        std::iter::once(&page.durable).chain(&page.history).cloned().collect()
                    };
                    let pages = image.pages.lock().unwrap().iter().map(states).collect();
                    crash.segments.insert(name.clone(), pages);
                }
            }
        }
        crash
    }
}

impl Storage for Medium {
    fn path(&self, name: &str) -> PathBuf {
        PathBuf::from("medium").join(name)
    }

    fn names(&self) -> io::Result<Vec<String>> {
        self.0.called("names")?;
        Ok(self.0.files.lock().unwrap().keys().filter(|&name| name != SPARE).cloned().collect())
    }

    fn prepare(&self, bytes: usize) -> io::Result<Map> {
        self.0.called("prepare")?;
        let image = Image::new(&vec![0; bytes], &self.0);
        self.0.files.lock().unwrap().insert(SPARE.to_owned(), File::Segment(Arc::clone(&image)));
        Ok(Map::image(image, HEADER_PAGE))
    }

    fn adopt(&self, name: &str) -> io::Result<()> {
        self.0.called("adopt")?;
        let mut files = self.0.files.lock().unwrap();
        let spare = files.remove(SPARE).ok_or(io::ErrorKind::NotFound)?;
        let old = files.insert(name.to_owned(), spare);
        assert!(old.is_none(), "{name} would be overwritten");
        Ok(())
    }

    fn discard_spare(&self) {
        self.0.files.lock().unwrap().remove(SPARE);
    }

    fn open(&self, name: &str, write: Option<usize>) -> io::Result<Map> {
        self.0.called("open")?;
        let mut files = self.0.files.lock().unwrap();
        let Some(File::Segment(image)) = files.get(name) else { return Err(io::ErrorKind::NotFound.into()) };
        let mut image = Arc::clone(image);
        if let Some(bytes) = write.filter(|&bytes| bytes > image.len()) {
            let mut content: Vec<u8> = (0..image.live.len()).flat_map(|index| image.page(index)).collect();
            content.resize(bytes, 0);
            image = Image::new(&content, &self.0);
            files.insert(name.to_owned(), File::Segment(Arc::clone(&image)));
        }
        let tail = image.len();
        Ok(Map::image(image, tail))
    }

    fn release(&self, name: &str, range: Range<usize>) {
        if let Some(File::Segment(image)) = self.0.files.lock().unwrap().get(name) {
            image.punch(range);
        }
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.called("remove")?;
        let removed = self.0.files.lock().unwrap().remove(name);
        removed.map(|_| ()).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        self.0.called("read")?;
        match self.0.files.lock().unwrap().get(name) {
            Some(File::Small(bytes)) => Ok(Some(bytes.clone())),
            _ => Ok(None),
        }
    }

    fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.0.called("replace")?;
        self.0.files.lock().unwrap().insert(name.to_owned(), File::Small(bytes.to_vec()));
        Ok(())
    }
}
