//! A relay as a process.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use super::common::{Process, driftless};

/// For an answer of a relay that lives.
const ANSWER: Duration = Duration::from_secs(30);

pub(crate) struct Relay {
    process: Process,
    url: String,
}

impl Relay {
    pub(crate) fn start(store: &Path, cache: &Path, kill_at: Option<&str>) -> Self {
        let mut command = driftless();
        command.args(["--json", "--die-with-parent", "relay", "--listen", "127.0.0.1:0", "--store"]);
        command.arg(store).arg("--cache-dir").arg(cache);
        command.envs(kill_at.map(|at| ("DRIFTLESS_KILL_AT", at)));
        let mut process = Process::start("relay", cache.parent().expect("a directory"), &mut command);
        let said = process.says(0).expect("where it listens");
        let url = said["url"].as_str().expect("where it listens").to_owned();
        Self { process, url }
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Whether it was killed by itself.
    pub(crate) fn has_ended(mut self) -> bool {
        if self.answers() {
            return false;
        }
        self.process.wait();
        true
    }

    /// A process that has died, or is dying, does not.
    fn answers(&self) -> bool {
        let address = self.url.trim_start_matches("http://");
        let asked = TcpStream::connect(address).and_then(|mut stream| {
            stream.set_read_timeout(Some(ANSWER))?;
            stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
            stream.read(&mut [0; 16])
        });
        asked.is_ok_and(|bytes| bytes > 0)
    }
}
