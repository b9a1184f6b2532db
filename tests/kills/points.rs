//! Every named point of the source is one that some test kills a process at.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{POINTS, workspace};

/// The other tests that kill at points, which say themselves that they hit every one they name.
const OTHERS: [&str; 4] = [
    "tests/crash/main.rs",
    "transport/slime/tests/slime_crash.rs",
    "transport/relay/tests/relay.rs",
    "transport/relay/tests/relay_ucx.rs",
];

#[test]
fn no_point_of_the_source_is_left_out() {
    let mut named = BTreeMap::new();
    for root in [
        "",
        "delta",
        "transport",
        "transport/store",
        "transport/slime",
        "transport/relay",
        "buffer",
        "bridge",
        "trainer",
    ] {
        collect(&workspace().join(root).join("src"), &mut named);
    }
    assert!(named.len() > 15, "the points are found: {named:?}");
    let others = OTHERS.map(|path| std::fs::read_to_string(workspace().join(path)).expect("a test"));
    for (point, place) in named {
        let here = POINTS.iter().any(|(_, known)| *known == point);
        let elsewhere = others.iter().any(|text| text.contains(&format!("\"{point}\"")));
        assert!(here || elsewhere, "{point} of {} is in no kill matrix", place.display());
    }
}

/// The names in `fail_point!("…")` and `crash_point("…")` below a directory.
fn collect(directory: &Path, named: &mut BTreeMap<String, PathBuf>) {
    for (path, text) in files(directory) {
        for opening in ["fail_point!(", "crash_point("] {
            for (_, rest) in text.match_indices(opening).map(|(at, _)| text.split_at(at + opening.len())) {
                let name = rest.trim_start().strip_prefix('"').and_then(|rest| rest.split_once('"'));
                named.extend(name.map(|(name, _)| (name.to_owned(), path.clone())));
            }
        }
    }
}

/// Every source file below a directory, with its text.
fn files(directory: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).expect("a source file");
            found.push((path, text));
        }
    }
    found
}
