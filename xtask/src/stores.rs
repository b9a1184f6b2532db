//! Object stores on this machine: Ceph's radosgw from Debian, moto from PyPI, azurite from npm.
//!
//! radosgw is the real thing on one monitor and one object store daemon that keeps everything in memory;
//! azurite is Azure's own emulator; moto is a second dialect of S3. The order of Ceph's steps matters: keys
//! before the monitor's file system, a monitor that answers before the daemon gets its key, a daemon that is
//! up before the gateway makes its pools.

use crate::error::{Error, Result};
use crate::install;
use crate::process::{self, Background, found, run_logged};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const MOTO: &str = "5.2.5";
const AZURITE: &str = "3.37.0";
/// A file of a complete installation of each.
const MOTO_PYTHON: &str = "bin/python";
const AZURITE_MAIN: &str = "node_modules/azurite/dist/src/blob/main.js";
const PACKAGES: [&str; 5] = ["radosgw", "ceph-mon", "ceph-osd", "ceph-mgr", "ceph-common"];
const PROGRAMS: [&str; 6] = ["radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-osd", "ceph-authtool"];

/// A monitor's first answer and a daemon's first report take seconds on an idle machine.
const READY: Duration = Duration::from_secs(120);
/// Bucket or container of all tests.
const BUCKET: &str = "driftless";

/// Credentials of servers that end with the lane. Azurite's are the ones that it documents.
const CREDENTIALS: [(&str, &str); 4] = [
    ("AWS_ACCESS_KEY_ID", "lane-stores"),
    ("AWS_SECRET_ACCESS_KEY", "lane-stores-secret"),
    ("AZURE_STORAGE_ACCOUNT_NAME", "devstoreaccount1"),
    (
        "AZURE_STORAGE_ACCOUNT_KEY",
        "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    ),
];

/// What is missing and how to get it, or `None`.
pub(crate) fn missing(cache: &Path) -> Option<String> {
    if let Some(program) = PROGRAMS.iter().find(|program| !found(program)) {
        return Some(format!("`{program}` (as root: apt-get install {})", PACKAGES.join(" ")));
    }
    let absent = !moto(cache).is_file() || !azurite(cache).is_file();
    absent.then(|| format!("moto {MOTO} and azurite {AZURITE}, 500 MB (cargo xtask test --ci stores)"))
}

/// Installs what is missing: Debian packages for the system, the other two into the cache.
pub(crate) fn install(cache: &Path) -> Result<()> {
    let programs: Vec<&str> = PROGRAMS.into_iter().filter(|program| !found(program)).collect();
    let npm = (!azurite(cache).is_file() && !found("npm")).then_some("npm");
    if !programs.is_empty() || npm.is_some() {
        let packages: Vec<&str> = PACKAGES.into_iter().filter(|_| !programs.is_empty()).chain(npm).collect();
        process::apt("stores", &packages)?;
    }
    if !moto(cache).is_file() {
        println!("stores: moto {MOTO}");
        install::into_place(&home(cache, "moto", MOTO), MOTO_PYTHON, |partial| {
            process::run(Command::new("python3").args(["-m", "venv"]).arg(partial))?;
            // Its scripts name the directory they were made in and do not survive the renaming; its
            // interpreter does.
            process::run(install::pip(partial.join("bin/python")).arg(format!("moto[server]=={MOTO}")))
        })?;
    }
    if !azurite(cache).is_file() {
        println!("stores: azurite {AZURITE}");
        install::into_place(&home(cache, "azurite", AZURITE), AZURITE_MAIN, |partial| {
            let mut npm = Command::new("npm");
            npm.args(["install", "--silent", "--no-audit", "--no-fund", "--prefix"]);
            process::run(npm.arg(partial).arg(format!("azurite@{AZURITE}")))
        })?;
    }
    Ok(())
}

fn home(cache: &Path, name: &str, version: &str) -> PathBuf {
    cache.join(format!("{name}-{version}"))
}

fn moto(cache: &Path) -> PathBuf {
    home(cache, "moto", MOTO).join(MOTO_PYTHON)
}

fn azurite(cache: &Path) -> PathBuf {
    home(cache, "azurite", AZURITE).join(AZURITE_MAIN)
}

/// Running servers with an empty bucket each; they end with this value, and with this process however that
/// ends.
pub(crate) struct Servers {
    /// In the order in which they are to end.
    _running: Vec<Background>,
    urls: Vec<String>,
}

impl Servers {
    /// Starts all three. What they write goes under `work`, which is emptied.
    pub(crate) fn start(cache: &Path, work: &Path) -> Result<Self> {
        install::remove(work)?;
        fs::create_dir_all(work).map_err(Error::io(work))?;
        let begin = Instant::now();
        let mut running = Vec::new();
        let mut urls = Vec::new();

        let port = process::free_port()?;
        let mut server = Command::new(moto(cache));
        let script = crate::workspace().join("xtask/stores/one_at_a_time.py");
        server.arg(script).arg(port.to_string());
        running.push(listening("moto", server, port, work)?);
        urls.push(bucket("s3", &format!("http://127.0.0.1:{port}"), work)?);

        let port = process::free_port()?;
        let mut server = Command::new("node");
        server.arg(azurite(cache)).args(["--inMemoryPersistence", "--skipApiVersionCheck", "--silent"]);
        // Otherwise it tries to reach a telemetry host.
        server.args(["--disableTelemetry", "--blobHost", "127.0.0.1", "--blobPort", &port.to_string()]);
        running.push(listening("azurite", server, port, work)?);
        urls.push(bucket("az", &format!("http://127.0.0.1:{port}/devstoreaccount1"), work)?);

        let (ceph, port) = Ceph::start(work)?;
        running.extend(ceph);
        urls.push(bucket("s3", &format!("http://127.0.0.1:{port}"), work)?);

        println!("stores: moto, azurite and radosgw are up, {:.0} s", begin.elapsed().as_secs_f64());
        Ok(Servers { _running: running, urls })
    }

    /// Tells `command` where the servers are.
    pub(crate) fn tell<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        command.env("DRIFTLESS_STORES", self.urls.join(" ")).envs(CREDENTIALS)
    }
}

/// Creates the bucket; object stores do not when something is put into one. Returns the URL of a place in it.
fn bucket(scheme: &str, endpoint: &str, work: &Path) -> Result<String> {
    let mut create = Command::new("python3");
    create.arg(crate::workspace().join("xtask/stores/create_bucket.py"));
    run_logged(create.args([scheme, endpoint, BUCKET]).envs(CREDENTIALS), &work.join("setup.log"))?;
    Ok(format!("{scheme}://{BUCKET}/lane?endpoint={endpoint}"))
}

fn listening(name: &str, command: Command, port: u16, work: &Path) -> Result<Background> {
    let mut server = start(name, command, &work.join(format!("{name}.log")))?;
    server.wait_listening(port, READY)?;
    Ok(server)
}

/// Starts a server that the system kills when this process ends without having done so.
fn start(name: &str, command: Command, log: &Path) -> Result<Background> {
    let mut guarded = Command::new("setpriv");
    guarded.args(["--pdeathsig", "KILL"]).arg(command.get_program()).args(command.get_args());
    guarded.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    Background::start(name, &mut guarded, log)
}

/// A Ceph cluster of one.
struct Ceph {
    dir: PathBuf,
    log: PathBuf,
}

impl Ceph {
    /// The gateway, its daemon and its monitor, and the gateway's port.
    fn start(work: &Path) -> Result<(Vec<Background>, u16)> {
        let dir = work.join("ceph");
        for part in ["mon", "osd", "rgw"] {
            fs::create_dir_all(dir.join(part)).map_err(Error::io(&dir))?;
        }
        let dir = fs::canonicalize(&dir).map_err(Error::io(&dir))?;
        let ceph = Ceph { dir, log: work.join("setup.log") };
        let (port, monitor_port) = (process::free_port()?, process::free_port()?);
        let id = uuid()?;
        let conf = ceph.dir.join("ceph.conf");
        fs::write(&conf, ceph.configuration(&id, monitor_port, port)).map_err(Error::io(&conf))?;

        ceph.make_keys(&id, monitor_port)?;
        let (monmap, keyring) = (ceph.file("monmap"), ceph.file("keyring"));
        ceph.run("ceph-mon", &["--mkfs", "-i", "a", "--monmap", &monmap, "--keyring", &keyring])?;
        let monitor = ceph.daemon("ceph-mon", &["-f", "-i", "a"], work)?;
        ceph.until("the monitor", &["-s"], "")?;

        ceph.run("ceph", &["config", "set", "global", "mon_allow_pool_size_one", "true"])?;
        let osd_id = uuid()?;
        ceph.run("ceph", &["osd", "new", &osd_id])?;
        let osd_keyring = ceph.file("osd/keyring");
        let caps = ["osd", "allow *", "mon", "allow profile osd"];
        ceph.run("ceph", &[&["auth", "get-or-create", "osd.0"], &caps[..], &["-o", &osd_keyring]].concat())?;
        ceph.run("ceph-osd", &["-i", "0", "--mkfs", "--osd-uuid", &osd_id])?;
        let osd = ceph.daemon("ceph-osd", &["-f", "-i", "0"], work)?;
        ceph.until("the object store daemon", &["osd", "stat"], "1 up")?;

        let mut gateway = ceph.daemon("radosgw", &["-f", "-n", "client.rgw"], work)?;
        gateway.wait_listening(port, READY)?;
        let [(_, access), (_, secret), ..] = CREDENTIALS;
        let user = ["user", "create", "--uid", "lane", "--display-name", "lane"];
        ceph.run("radosgw-admin", &[&user[..], &["--access-key", access, "--secret-key", secret]].concat())?;
        Ok((vec![gateway, osd, monitor], port))
    }

    fn file(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }

    fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.arg("-c").arg(self.dir.join("ceph.conf")).args(args);
        command
    }

    fn run(&self, program: &str, args: &[&str]) -> Result<()> {
        run_logged(&mut self.command(program, args), &self.log)
    }

    fn daemon(&self, program: &str, args: &[&str], work: &Path) -> Result<Background> {
        start(program, self.command(program, args), &work.join(format!("{program}.log")))
    }

    /// Asks the monitor until its answer contains `expected`.
    fn until(&self, what: &str, args: &[&str], expected: &str) -> Result<()> {
        let begin = Instant::now();
        while begin.elapsed() < READY {
            let mut ask = self.command("ceph", &["--connect-timeout", "5"]);
            match process::output_logged(ask.args(args), &self.log) {
                Ok(answer) if answer.contains(expected) => return Ok(()),
                Ok(_) | Err(Error::Failed { .. }) => {}
                // It could not be asked.
                Err(error) => return Err(error),
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Err(process::not_ready(what, "did not answer".to_owned(), READY, &self.log))
    }

    fn make_keys(&self, id: &str, monitor_port: u16) -> Result<()> {
        let (monmap, keyring) = (self.file("monmap"), self.file("keyring"));
        let address = format!("[v2:127.0.0.1:{monitor_port}]");
        let mut map = Command::new("monmaptool");
        run_logged(map.args(["--create", "--fsid", id, "--addv", "a", &address, &monmap]), &self.log)?;
        let key = |args: &[&str]| run_logged(Command::new("ceph-authtool").args(args), &self.log);
        key(&["--create-keyring", &keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *"])?;
        let caps = ["--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *"];
        for name in ["client.admin", "client.rgw"] {
            key(&[&[&keyring, "--gen-key", "-n", name], &caps[..]].concat())?;
        }
        Ok(())
    }

    /// One copy of everything, in memory, and no sockets in the file system, whose paths could be too long
    /// for one.
    fn configuration(&self, id: &str, monitor_port: u16, port: u16) -> String {
        let dir = self.dir.display();
        format!(
            "[global]
fsid = {id}
mon_initial_members = a
mon_host = v2:127.0.0.1:{monitor_port}
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
osd_pool_default_pg_autoscale_mode = off
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
osd_crush_chooseleaf_type = 0
osd_objectstore = memstore
memstore_device_bytes = 2147483648
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
keyring = {dir}/keyring
run_dir = {dir}
admin_socket =
log_file = {dir}/$name.log
mon_data = {dir}/mon
osd_data = {dir}/osd
mon_data_avail_crit = 1
[osd]
keyring = {dir}/osd/keyring
[client.rgw]
rgw_frontends = beast endpoint=127.0.0.1:{port}
rgw_data = {dir}/rgw
rgw_run_sync_thread = false
"
        )
    }
}

fn uuid() -> Result<String> {
    let path = "/proc/sys/kernel/random/uuid";
    fs::read_to_string(path).map(|id| id.trim().to_owned()).map_err(Error::io(path))
}
