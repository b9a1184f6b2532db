//! The run's side of `fleet.sock`: who asks is answered, and what changes is remembered.

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use driftless_bridge::fleet::{EngineStatus, Phase};
use driftless_bridge::{Fleet, Keys};
use driftless_store::chain_text;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixSocket, UnixStream};
use tokio::runtime::Runtime;
use tokio::sync::{Mutex, Semaphore};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::changes::{Changes, Engine, url_of};
use crate::door::{Answer, Request, SOCKET};
use crate::error::{Error, Result, io as io_error};

/// Those who ask at one time; others wait.
const CONNECTIONS: usize = 32;
/// How long one of them may take to say what, and to take the answer.
const CALL: Duration = Duration::from_secs(10);
/// Longest request.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// Pause after a connection that could not be accepted, mostly for want of descriptors, and between two looks at an engine
/// that is going.
const AGAIN: Duration = Duration::from_millis(100);

/// What is changed for those who ask.
pub(super) struct Keeper {
    pub(super) fleet: Arc<Fleet>,
    /// For added engines that are to have them.
    pub(super) keys: Keys,
    /// The run's directory.
    pub(super) save: PathBuf,
    pub(super) changes: Mutex<Changes>,
    /// URLs of engines that come once they have gone.
    pub(super) coming: std::sync::Mutex<BTreeSet<String>>,
    /// Whether the loop pushes into a fixed set of engines.
    pub(super) pushes: bool,
}

/// The open socket, which goes when this is dropped.
#[derive(Debug)]
pub(super) struct Door {
    path: PathBuf,
    _task: JoinSet<()>,
}

impl Drop for Door {
    fn drop(&mut self) {
        // One that stays is replaced by the next run.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Door {
    /// Opens it in the directory of a run that nobody else has: a socket that is there is a dead process's.
    pub(super) fn open(runtime: &Runtime, keeper: Arc<Keeper>) -> Result<Self> {
        let path = keeper.save.join(SOCKET);
        let listener = {
            let _inside = runtime.enter();
            listen(&path).map_err(io_error("listen on", &path))?
        };
        let mut task = JoinSet::new();
        task.spawn_on(accept(listener, keeper), runtime.handle());
        Ok(Self { path, _task: task })
    }
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(io::Error::new(ErrorKind::AlreadyExists, "there is something that is no socket"));
        }
        Ok(_) => std::fs::remove_file(path)?,
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let socket = UnixSocket::new_stream()?;
    socket.bind(path)?;
    // Nobody gets through before it listens.
    std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
    socket.listen(CONNECTIONS as u32)
}

async fn accept(listener: UnixListener, keeper: Arc<Keeper>) {
    let (places, mut calls) = (Arc::new(Semaphore::new(CONNECTIONS)), JoinSet::new());
    loop {
        // It is never closed.
        let Ok(place) = places.clone().acquire_owned().await else { return };
        while calls.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _)) => {
                let keeper = keeper.clone();
                calls.spawn(async move {
                    let _place = place;
                    if let Err(error) = answer_all(stream, &keeper).await {
                        tracing::debug!(%error, "who asked on fleet.sock has gone");
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a connection to fleet.sock was not accepted");
                tokio::time::sleep(AGAIN).await;
            }
        }
    }
}

/// Answers line after line until there is none, or one is not to be had in time.
async fn answer_all(stream: UnixStream, keeper: &Keeper) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        let mut bounded = (&mut stream).take(LINE_BYTES_MAX);
        timeout(CALL, bounded.read_until(b'\n', &mut line)).await??;
        if line.is_empty() {
            return Ok(());
        }
        let is_whole = line.last() == Some(&b'\n');
        let answer = match serde_json::from_slice(&line) {
            _ if !is_whole => {
                Answer::Refused { why: format!("a request is a line of at most {LINE_BYTES_MAX} bytes") }
            }
            Err(error) => Answer::Refused { why: format!("the line is no request: {error}") },
            Ok(request) => keeper.answer(request).await,
        };
        let mut said = serde_json::to_vec(&answer)?;
        said.push(b'\n');
        timeout(CALL, stream.get_mut().write_all(&said)).await??;
        if !is_whole {
            return Ok(());
        }
    }
}

impl Keeper {
    /// Does what is asked, or says why not.
    pub(super) async fn answer(&self, request: Request) -> Answer {
        match self.change(request).await {
            Ok(()) => Answer::Engines(self.fleet.status().into_iter().map(Into::into).collect()),
            Err(error) => Answer::Refused { why: chain_text(&error) },
        }
    }

    async fn change(&self, request: Request) -> Result<()> {
        if self.pushes && request != Request::List {
            return Err(Error::FleetFixed);
        }
        match request {
            Request::List => {}
            Request::Add { address, keys } => {
                let engine = Engine { address, keys };
                self.add(&engine, |changes, url| changes.add(&engine, url)).await?;
            }
            Request::Drain { address, seconds } => {
                let url = self.note_removed(&address).await?;
                self.fleet.drain(&url, Duration::from_secs(seconds)).await?;
            }
            Request::Remove { address } => {
                let url = self.note_removed(&address).await?;
                self.fleet.remove(&url)?;
            }
        }
        Ok(())
    }

    /// Adds an engine that a file or a name has, unless it is there. One that is still going comes back once it has gone,
    /// which it does by the deadline of its drain, unless it is let go meanwhile.
    pub(super) async fn take_in(&self, engine: &Engine) -> Result<()> {
        let url = url_of(&engine.address)?;
        self.coming().insert(url.clone());
        while self.fleet.url_of(&url).is_ok() {
            let is_going = |status: &EngineStatus| status.url == url && status.phase == Phase::Draining;
            if !self.fleet.status().iter().any(is_going) {
                self.coming().remove(&url);
                return Ok(());
            }
            tokio::time::sleep(AGAIN).await;
        }
        if !self.coming().remove(&url) {
            return Ok(());
        }
        self.add(engine, |changes, url| changes.forget(url)).await
    }

    fn coming(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.coming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drains an engine that a file no longer names, if it is there. What was changed of it by hand is over either way.
    pub(super) async fn let_go(&self, url: &str, deadline: Duration) -> Result<()> {
        self.coming().remove(url);
        self.note(|changes| changes.forget(url)).await?;
        if self.fleet.url_of(url).is_err() {
            return Ok(());
        }
        tracing::info!(engine = url, "engine is to go");
        Ok(self.fleet.drain(url, deadline).await?)
    }

    /// Adds an engine, once `say` has said so to what is remembered.
    async fn add(&self, engine: &Engine, say: impl FnOnce(&mut Changes, &str)) -> Result<()> {
        let nothing = Keys::default();
        let with_keys = engine.keys;
        let url = self.fleet.add(&engine.address, if with_keys { &self.keys } else { &nothing })?;
        if let Err(error) = self.note(|changes| say(changes, &url)).await {
            // What is not remembered is not done.
            self.fleet.remove(&url)?;
            return Err(error);
        }
        tracing::info!(engine = url, with_keys, "engine added");
        if with_keys && !self.keys.in_clear(std::slice::from_ref(&url))?.is_empty() {
            tracing::warn!(
                engine = url,
                "`keys` go to the engine in clear text: add it at an address of https://"
            );
        }
        Ok(())
    }

    /// Remembers that an engine is to go, and returns its URL.
    async fn note_removed(&self, address: &str) -> Result<String> {
        let url = self.fleet.url_of(address)?;
        self.coming().remove(&url);
        self.note(|changes| changes.remove(&url)).await?;
        tracing::info!(engine = url, "engine is to go");
        Ok(url)
    }

    /// Remembers a change.
    async fn note(&self, say: impl FnOnce(&mut Changes)) -> Result<()> {
        let mut changes = self.changes.lock().await;
        let mut next = changes.clone();
        say(&mut next);
        if next != *changes {
            tokio::task::block_in_place(|| next.write(&self.save))?;
            *changes = next;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader as Lines, Write as _};
    use std::os::unix::net::UnixStream as Plain;

    use driftless_bridge::fleet::FleetOptions;
    use driftless_bridge::{Expected, GenerateRequest, Generation, Rid, SamplingParams};
    use driftless_testkit::sglang::{Fake, checkpoint, patient};

    use tokio::task::JoinHandle;

    use super::*;
    use crate::door::{EngineRow, Listen, ask, ask_at};
    use crate::train::listen;

    const LONG: Duration = Duration::from_secs(60);

    type Answers = JoinHandle<driftless_bridge::Result<Generation>>;

    /// A run's directory, its engine, another engine, and the open door.
    struct Scene {
        dir: tempfile::TempDir,
        fakes: [Fake; 2],
        keeper: Arc<Keeper>,
        _door: Door,
        runtime: Runtime,
    }

    impl Scene {
        fn new(pushes: bool) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let model = checkpoint(&dir.path().join("model"), 1, 4);
            let fakes = [Fake::start(&model), Fake::start(&model)];
            let runtime = Runtime::new().unwrap();
            let keeper = keeper(&runtime, dir.path(), &fakes[0], pushes).unwrap();
            let door = Door::open(&runtime, keeper.clone()).unwrap();
            Scene { dir, fakes, keeper, _door: door, runtime }
        }

        fn ask(&self, request: &Request) -> Result<Vec<EngineRow>> {
            ask(self.dir.path(), request, LONG)
        }

        fn address(&self, at: usize) -> String {
            self.fakes[at].address.to_string()
        }

        fn url(&self, at: usize) -> String {
            format!("http://{}", self.fakes[at].address)
        }

        /// A request that the first engine does not answer, and that engine's drain, which has begun. On a busy machine it
        /// may have ended by its deadline.
        fn drains(&self, deadline: Duration) -> (Answers, JoinHandle<Result<()>>) {
            let asked = self.fakes[0].hang("POST /generate");
            let request = GenerateRequest::new(Rid::new(1, 2), vec![1], SamplingParams::default());
            let (fleet, keeper, url) = (self.keeper.fleet.clone(), self.keeper.clone(), self.url(0));
            let answer = self.runtime.spawn(async move { fleet.generate(request, None).await });
            asked.recv_timeout(LONG).expect("the engine is asked");
            let drains = self.runtime.spawn(async move { keeper.let_go(&url, deadline).await });
            while self.ask(&Request::List).unwrap().iter().any(|row| row.phase == "serving") {
                std::thread::yield_now();
            }
            (answer, drains)
        }

        fn file(&self) -> serde_json::Value {
            let bytes = std::fs::read(self.dir.path().join("fleet.json")).unwrap();
            serde_json::from_slice(&bytes).unwrap()
        }
    }

    fn keeper(runtime: &Runtime, save: &Path, fake: &Fake, pushes: bool) -> Result<Arc<Keeper>> {
        let keys = Keys::new(Some("key"), None)?;
        let expected = Expected::from_checkpoint(&fake.engine().started_with.clone())?;
        let options = FleetOptions::default().with_calls(patient().deadlines);
        let addresses = [fake.address.to_string()];
        let fleet = runtime.block_on(Fleet::attach(&addresses, &keys, &expected, options))?;
        let (fleet, save) = (Arc::new(fleet), save.to_owned());
        Ok(Arc::new(Keeper {
            fleet,
            keys,
            save,
            changes: Mutex::default(),
            coming: Default::default(),
            pushes,
        }))
    }

    fn urls(rows: &[EngineRow]) -> Vec<&str> {
        rows.iter().map(|row| row.address.as_str()).collect()
    }

    #[test]
    fn engines_are_listed_added_drained_removed_and_remembered() {
        let scene = Scene::new(false);
        let listed = scene.ask(&Request::List).unwrap();
        assert_eq!(urls(&listed), [scene.url(0)]);
        assert_eq!((listed[0].phase.as_str(), listed[0].in_flight), ("serving", 0));
        assert!(!scene.dir.path().join("fleet.json").exists(), "nothing was changed");

        let added = scene.ask(&Request::Add { address: scene.address(1), keys: false }).unwrap();
        assert_eq!(urls(&added), [scene.url(0), scene.url(1)]);
        let engine = serde_json::json!({"address": scene.address(1), "keys": false});
        assert_eq!(scene.file(), serde_json::json!({"added": [engine], "removed": []}));

        let drained = scene.ask(&Request::Drain { address: scene.address(0), seconds: 60 }).unwrap();
        assert_eq!(urls(&drained), [scene.url(1)]);
        assert!(scene.ask(&Request::Remove { address: scene.url(1) }).unwrap().is_empty());
        let removed = [scene.url(0), scene.url(1)];
        assert_eq!(scene.file(), serde_json::json!({"added": [], "removed": removed}));
        assert!(scene.fakes[1].engine().keys.iter().all(|(_, key)| key.is_none()));
    }

    #[test]
    fn engines_of_a_file_come_and_go_unless_they_did_already() {
        let scene = Scene::new(false);
        let take_in = |keys: bool| {
            let engine = Engine { address: scene.address(1), keys };
            scene.runtime.block_on(scene.keeper.take_in(&engine)).unwrap();
        };
        let let_go = || scene.runtime.block_on(scene.keeper.let_go(&scene.url(1), LONG)).unwrap();
        let_go();
        take_in(true);
        take_in(false);
        assert_eq!(urls(&scene.ask(&Request::List).unwrap()), [scene.url(0), scene.url(1)]);
        let_go();
        assert_eq!(urls(&scene.ask(&Request::List).unwrap()), [scene.url(0)]);
        assert!(!scene.dir.path().join("fleet.json").exists(), "the file tells the next start");
        // What was changed by hand is over where the file says otherwise.
        let by_hand = || {
            scene.ask(&Request::Add { address: scene.address(1), keys: false }).unwrap();
            scene.ask(&Request::Remove { address: scene.address(1) }).unwrap();
        };
        by_hand();
        take_in(false);
        assert_eq!(scene.file(), serde_json::json!({"added": [], "removed": []}));
        let_go();
        by_hand();
        let_go();
        assert_eq!(scene.file(), serde_json::json!({"added": [], "removed": []}), "the file has dropped it");
    }

    #[test]
    fn engine_that_is_let_go_while_it_waits_to_come_back_stays_away() {
        let scene = Scene::new(false);
        let (hangs, drains) = scene.drains(10 * LONG);
        let (keeper, url) = (scene.keeper.clone(), scene.url(0));
        let engine = Engine { address: scene.address(0), keys: false };
        scene.runtime.block_on(async {
            let mut comes = std::pin::pin!(keeper.take_in(&engine));
            tokio::select! {
                biased;
                done = &mut comes => panic!("it still drains: {done:?}"),
                () = tokio::task::yield_now() => {}
            }
            keeper.let_go(&url, Duration::ZERO).await.unwrap();
            comes.await.unwrap();
        });
        scene.runtime.block_on(drains).unwrap().unwrap();
        assert!(scene.ask(&Request::List).unwrap().is_empty());
        hangs.abort();
    }

    #[test]
    fn engine_named_again_while_it_drains_comes_back() {
        let scene = Scene::new(false);
        let (answer, drained) = scene.drains(Duration::from_secs(1));
        let engine = Engine { address: scene.address(0), keys: false };
        scene.runtime.block_on(scene.keeper.take_in(&engine)).unwrap();
        scene.runtime.block_on(drained).unwrap().unwrap();
        let answer = scene.runtime.block_on(answer).unwrap().unwrap();
        assert_eq!((answer.engine, answer.rid), (scene.url(0), Rid::new(1, 2).next_attempt()));
        assert_eq!(urls(&scene.ask(&Request::List).unwrap()), [scene.url(0)]);
    }

    #[test]
    fn change_that_cannot_be_made_is_refused_with_its_reason() {
        let scene = Scene::new(false);
        let add = |address: String| Request::Add { address, keys: false };
        let remove = |address: String| Request::Remove { address };
        for (request, words) in [
            (add(scene.url(0)), "is in the fleet already"),
            (remove(scene.url(1)), "is not in the fleet, which has"),
            (add("ftp://a:1".into()), "neither http nor https"),
        ] {
            let refused = scene.ask(&request).unwrap_err();
            assert!(matches!(&refused, Error::FleetRefused { why, .. } if why.contains(words)), "{refused}");
        }
        // What cannot be remembered is not done.
        std::fs::create_dir_all(scene.dir.path().join("fleet.json/taken")).unwrap();
        for request in [add(scene.address(1)), remove(scene.address(0))] {
            let refused = scene.ask(&request).unwrap_err().to_string();
            assert!(refused.contains("fleet.json"), "{refused}");
        }
        assert_eq!(urls(&scene.ask(&Request::List).unwrap()), [scene.url(0)]);
    }

    #[test]
    fn run_that_pushes_lists_its_engines_and_keeps_them() {
        let scene = Scene::new(true);
        assert_eq!(scene.ask(&Request::List).unwrap().len(), 1);
        let refused = scene.ask(&Request::Remove { address: scene.address(0) }).unwrap_err().to_string();
        assert!(refused.contains("`push`"), "{refused}");
        assert_eq!(scene.ask(&Request::List).unwrap().len(), 1);
    }

    #[test]
    fn engines_are_changed_over_http_with_the_token_only() {
        let scene = Scene::new(false);
        let listens = |token: Option<&str>| {
            let (addr, token) = ("127.0.0.1:0".parse().unwrap(), token.map(str::to_owned));
            listen::serve(&scene.runtime, &Listen { addr, token }, scene.keeper.clone()).unwrap()
        };
        let server = listens(Some("secret"));
        let url = format!("http://{}", server.addr());
        for (token, words) in [(None, "401"), (Some("other"), "401")] {
            let refused = ask_at(&url, token, &Request::List, LONG).unwrap_err();
            assert!(chain_text(&refused).contains(words), "{}", chain_text(&refused));
        }
        let ask = |request: &Request| ask_at(&url, Some("secret"), request, LONG);
        let added = ask(&Request::Add { address: scene.address(1), keys: false }).unwrap();
        assert_eq!(urls(&added), [scene.url(0), scene.url(1)]);
        let again = ask(&Request::Add { address: scene.address(1), keys: false }).unwrap_err();
        assert!(matches!(&again, Error::FleetRefused { run, .. } if *run == url), "{again}");
        let drained = ask(&Request::Drain { address: scene.address(0), seconds: 60 }).unwrap();
        assert_eq!(
            (urls(&drained), urls(&scene.ask(&Request::List).unwrap())),
            (vec![&*scene.url(1)], vec![&*scene.url(1)])
        );
        drop(server);
        let gone = ask(&Request::List).unwrap_err();
        assert!(matches!(gone, Error::NoRunAt { .. }), "{gone}");
        let open = listens(None);
        let with_keys = Request::Add { address: scene.address(0), keys: true };
        let refused = ask_at(&format!("http://{}", open.addr()), None, &with_keys, LONG).unwrap_err();
        assert!(chain_text(&refused).contains("fleet.sock"), "{}", chain_text(&refused));
        assert_eq!(ask_at(&format!("http://{}", open.addr()), None, &Request::List, LONG).unwrap().len(), 1);
        let body = serde_json::to_vec(&Request::Remove { address: scene.url(1) }).unwrap();
        let mut page = std::net::TcpStream::connect(open.addr()).unwrap();
        write!(
            page,
            "POST /fleet HTTP/1.1\r\nhost: localhost\r\norigin: http://elsewhere\r\nconnection: close\r\n"
        )
        .unwrap();
        write!(page, "content-length: {}\r\n\r\n", body.len()).unwrap();
        page.write_all(&body).unwrap();
        let status = Lines::new(page).lines().next().unwrap().unwrap();
        assert!(status.contains("403"), "{status}");
        assert_eq!(urls(&scene.ask(&Request::List).unwrap()), [scene.url(1)]);
    }

    #[test]
    fn line_that_is_no_request_is_answered_and_a_long_one_ends_it() {
        let scene = Scene::new(false);
        let stream = Plain::connect(scene.dir.path().join(SOCKET)).unwrap();
        let (mut write, mut lines) = (stream.try_clone().unwrap(), Lines::new(stream).lines());
        let mut say = |line: &[u8]| {
            write.write_all(line).unwrap();
            lines.next().map(|answer| answer.unwrap_or_default())
        };
        for line in ["nonsense\n", "{\"do\": \"dance\"}\n", "{\"do\": \"remove\"}\n"] {
            let answer = say(line.as_bytes()).unwrap();
            assert!(answer.contains("is no request"), "{line}: {answer}");
        }
        assert!(say(b"{\"do\": \"list\"}\n").unwrap().contains("serving"));
        let endless = vec![b'x'; LINE_BYTES_MAX as usize];
        assert!(say(&endless).unwrap().contains("at most"));
        assert_eq!(lines.next().map(|end| end.unwrap_or_default()), None);
    }

    #[test]
    fn socket_is_its_users_alone_and_a_dead_runs_is_replaced() {
        let scene = Scene::new(false);
        let socket = scene.dir.path().join(SOCKET);
        assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
        let (dir, runtime) = (tempfile::tempdir().unwrap(), Runtime::new().unwrap());
        drop(std::os::unix::net::UnixListener::bind(dir.path().join(SOCKET)).unwrap());
        let dead = ask(dir.path(), &Request::List, LONG);
        assert!(matches!(dead, Err(Error::NoRun { .. })), "{dead:?}");
        let keeper = keeper(&runtime, dir.path(), &scene.fakes[0], false).unwrap();
        let door = Door::open(&runtime, keeper.clone()).unwrap();
        assert_eq!(ask(dir.path(), &Request::List, LONG).unwrap().len(), 1);
        drop(door);
        assert!(!dir.path().join(SOCKET).exists());
        std::fs::write(dir.path().join(SOCKET), "a file").unwrap();
        let refused = Door::open(&runtime, keeper);
        assert!(matches!(refused, Err(Error::Io { .. })), "{refused:?}");
        assert!(dir.path().join(SOCKET).is_file());
    }
}
