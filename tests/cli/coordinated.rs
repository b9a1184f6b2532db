//! A coordinator of followers that come and go.

use crate::Run;
use crate::common::{Process, driftless, free_port};

impl Run {
    /// Starts a follower that waits for orders.
    fn follow_orders(&self, port: u16) -> Process {
        let mut command = driftless();
        command.args(["--die-with-parent", "follow", "--run", "test", "--coordinated", "--poll-ms", "20"]);
        command.arg("--store").arg(self.path("store")).arg("--checkpoint-dir").arg(self.path("host"));
        command.args(["--id", "host", "--listen", &format!("127.0.0.1:{port}")]);
        let mut follower = Process::start("follower", self.dir.path(), &mut command);
        follower.listening(port);
        follower
    }
}

#[test]
fn host_started_anew_is_brought_back_without_another_version() {
    let mut run = Run::new();
    run.publish();
    let port = free_port();
    let mut follower = run.follow_orders(port);
    let mut command = run.command("coordinate");
    command.args(["--follower", &format!("127.0.0.1:{port}"), "--poll-ms", "20"]).env("RUST_LOG", "info");
    let mut coordinator = Process::start("coordinator", run.dir.path(), &mut command);
    coordinator.until("the first round", |coordinator| coordinator.output().contains("rolled").then_some(()));
    run.assert_host_is_current();
    // The host is started again, and what it had in memory is lost.
    drop(follower);
    std::fs::remove_dir_all(run.path("host")).expect("a directory");
    follower = run.follow_orders(port);
    let whole = run.path("host/config.json");
    follower.until("its version", |_| whole.exists().then_some(()));
    run.assert_host_is_current();
}
