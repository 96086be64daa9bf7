//! Discovery against real processes: real titles by setproctitle, real forks, execs and PID namespaces.
//!
//! `OMNITAP_TEST_PYTHON` names a Python that has setproctitle and pyzmq, else `target/venv/bin/python` is taken.
//! Without one the tests say so and do nothing.

#![expect(
    clippy::unwrap_used,
    reason = "a failed unwrap is a failed test, in helpers as well"
)]

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    time::{Duration, Instant},
};

use omnitap::host::{
    Host, Settings,
    identity::{Change, Flavor, Pipeline, Process, Role},
};
use tempfile::TempDir;

/// A program that takes commands line by line, as a tree of processes: `title`, `exec`, `sockets`, `spawn`,
/// `fork` and `close` for itself, `NAME COMMAND` for a child. It tells `NAME PID` of each new child and ends with its input.
const NODE: &str = r#"
import os, subprocess, sys
import setproctitle, zmq
children = {}
for line in sys.stdin:
    word, _, rest = line.strip().partition(" ")
    if word == "title":
        setproctitle.setproctitle(rest)
    elif word == "exec":
        args = rest.split(" ")
        os.execv(sys.executable, [sys.executable, *args])
    elif word == "spawn" or word == "fork":
        if word == "spawn":
            code = "from multiprocessing.spawn import spawn_main; exec(open('%s').read()) #spawn_main(tracker_fd=5)" % NODE
            args = [sys.executable, "-c", code, "--multiprocessing-fork"]
            child = subprocess.Popen(args, stdin=subprocess.PIPE, text=True, bufsize=1)
            children[rest] = child.stdin
            print(rest, child.pid, flush=True)
        else:
            pid = os.fork()
            if pid == 0:
                os.read(0, 1)
                os._exit(0)
            print(rest, pid, flush=True)
    elif word == "sockets":
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
    elif word == "close":
        children.pop(rest).close()
        os.wait()
        print("closed", 0, flush=True)
    else:
        children[word].write(rest + "\n")
"#;

fn python() -> Option<PathBuf> {
    let named = std::env::var_os("OMNITAP_TEST_PYTHON").map(PathBuf::from);
    let python =
        named.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/venv/bin/python"));
    let works = Command::new(&python)
        .args(["-c", "import setproctitle, zmq"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !works {
        eprintln!(
            "SKIPPED: {} has no setproctitle and pyzmq; set OMNITAP_TEST_PYTHON",
            python.display()
        );
    }
    works.then_some(python)
}

/// A tree of processes below one that looks like a server by its argv.
struct Tree {
    root: Child,
    input: Option<ChildStdin>,
    output: BufReader<std::process::ChildStdout>,
    _dir: TempDir,
}

impl Tree {
    /// Starts `WRAPPER python DIR/vllm ARGS`.
    fn start(python: &Path, wrapper: &[&str], args: &[&str]) -> Self {
        let dir = TempDir::new().unwrap();
        let script = dir.path().join("vllm");
        fs::write(&script, format!("NODE = {:?}\n{NODE}", script.to_str().unwrap())).unwrap();
        let mut line: Vec<&str> = wrapper.to_vec();
        line.extend([python.to_str().unwrap(), script.to_str().unwrap()]);
        line.extend(args);
        let mut root = Command::new(line[0])
            .args(&line[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (root.stdin.take(), BufReader::new(root.stdout.take().unwrap()));
        Self {
            root,
            input,
            output,
            _dir: dir,
        }
    }

    fn pid(&self) -> u32 {
        self.root.id()
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Gives a command that answers with a pid, and returns it.
    fn ask(&mut self, line: &str) -> u32 {
        self.tell(line);
        let mut answer = String::new();
        self.output.read_line(&mut answer).unwrap();
        answer.trim().rsplit(' ').next().unwrap().parse().unwrap()
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        // Every process of the tree ends with its input.
        drop(self.input.take());
        let _ = self.root.wait();
    }
}

/// Scans as the agent does until `found` holds, and returns all changes.
fn scan_until(host: &mut Host, mut found: impl FnMut(&Host) -> bool) -> Vec<Change> {
    let start = Instant::now();
    let mut changes = host.scan().unwrap();
    while !found(host) {
        assert!(
            start.elapsed() < Duration::from_mins(1),
            "not found: {:?}",
            host.processes().collect::<Vec<_>>()
        );
        std::thread::sleep(host.next_look());
        changes.extend(host.scan().unwrap());
    }
    changes
}

fn role(host: &Host, pid: u32) -> Option<Role> {
    process(host, pid).map(|process| process.role)
}

fn process(host: &Host, pid: u32) -> Option<&Process> {
    host.processes().find(|process| process.key.pid == pid)
}

fn pipeline_of(host: &Host, pid: u32) -> Option<&Pipeline> {
    let id = process(host, pid)?.pipeline;
    host.pipelines().find(|pipeline| pipeline.id == id)
}

const fn stage(stage: u32, replica: u32) -> Role {
    Role::LlmStage {
        stage: Some(stage),
        replica: Some(replica),
    }
}

#[test]
fn a_pipeline_starts_restarts_a_stage_and_ends() {
    let Some(python) = python() else { return };
    let mut tree = Tree::start(
        &python,
        &[],
        &["serve", "org/m", "--omni", "--served-model-name", "m"],
    );
    let root = tree.pid();
    let mut host = Host::new(Settings::default());
    scan_until(&mut host, |host| role(host, root) == Some(Role::ApiServer));
    let first = tree.ask("spawn a");
    let second = tree.ask("spawn b");
    let core = "a title VLLM::StageEngineCoreProc_stage0_replica0_DP0";
    tree.tell(core);
    tree.tell("b title pod 1::StageEngineCoreProc_stage1_replica0_DP0");
    scan_until(&mut host, |host| {
        role(host, first) == Some(stage(0, 0)) && role(host, second) == Some(stage(1, 0))
    });
    let pipeline = pipeline_of(&host, root).unwrap().clone();
    assert_eq!(pipeline.flavor, Flavor::Omni);
    assert_eq!(
        (pipeline.model.as_deref(), pipeline.served_model.as_deref()),
        (Some("org/m"), Some("m"))
    );
    assert_eq!(process(&host, first).unwrap().pipeline, pipeline.id);
    assert_eq!(process(&host, first).unwrap().parent, root);
    assert!(host.is_watched(first));

    let key = process(&host, first).unwrap().key;
    tree.ask("close a");
    assert_eq!(host.gone(first), [Change::ProcessGone(key)]);
    let again = tree.ask("spawn a");
    // The kernel tells of the new process before it has its title.
    assert!(host.examine(again).unwrap().is_empty());
    tree.tell(core);
    scan_until(&mut host, |host| role(host, again) == Some(stage(0, 0)));
    assert_eq!(process(&host, again).unwrap().pipeline, pipeline.id);

    drop(tree);
    let changes = scan_until(&mut host, |host| {
        host.pipelines().all(|other| other.id != pipeline.id)
    });
    assert!(
        changes.contains(&Change::ProcessGone(pipeline.root)),
        "{changes:?}"
    );
    assert!(
        changes.contains(&Change::PipelineGone(pipeline.id)),
        "{changes:?}"
    );
}

#[test]
fn a_report_of_an_end_comes_while_the_process_still_dies() {
    let Some(python) = python() else { return };
    let tree = Tree::start(&python, &[], &["serve", "org/m"]);
    let root = tree.pid();
    let mut host = Host::new(Settings {
        scan_interval: Duration::from_millis(200),
        ..Settings::default()
    });
    scan_until(&mut host, |host| role(host, root).is_some());
    let key = process(&host, root).unwrap().key;
    assert_eq!(host.gone(root).first(), Some(&Change::ProcessGone(key)));
    host.scan().unwrap();
    assert_eq!(role(&host, root), None);
    // A report that was wrong does no lasting harm.
    scan_until(&mut host, |host| role(host, root).is_some());
}

#[test]
fn an_agent_that_starts_late_finds_everything_in_one_scan() {
    let Some(python) = python() else { return };
    let mut tree = Tree::start(&python, &[], &["serve", "org/m", "--max-model-len", "4K"]);
    let core = tree.ask("spawn a");
    tree.tell("a title VLLM::EngineCore_DP1");
    let worker = tree.ask("a spawn w");
    tree.tell("a w title VLLM::Worker_TP0");
    let title = |pid: u32| fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    while !title(worker).starts_with("VLLM::") {
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut host = Host::new(Settings::default());
    host.scan().unwrap();
    assert_eq!(role(&host, tree.pid()), Some(Role::ApiServer));
    assert_eq!(role(&host, core), Some(stage(0, 1)));
    assert_eq!(role(&host, worker), Some(Role::Worker));
    let pipeline = pipeline_of(&host, core).unwrap();
    assert_eq!(
        (pipeline.flavor, pipeline.max_model_len),
        (Flavor::Vllm, Some(4096))
    );
    // pyzmq is mapped, so its directory was found; there is no vLLM in it.
    assert_eq!(pipeline.versions.vllm, None);
}

#[test]
fn a_shell_that_becomes_a_server_is_found_by_its_event() {
    let Some(python) = python() else { return };
    let dir = TempDir::new().unwrap();
    let script = dir.path().join("vllm");
    fs::write(&script, "import sys; sys.stdin.read()").unwrap();
    let mut tree = Tree::start(&python, &[], &["idle"]);
    let root = tree.pid();
    let mut host = Host::new(Settings::default());
    host.scan().unwrap();
    assert_eq!(role(&host, root), None);
    tree.tell(&format!("exec {} serve m", script.display()));
    while role(&host, root).is_none() {
        // As the exec tracepoint would, at some moment around the exec.
        host.examine(root).unwrap();
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(pipeline_of(&host, root).unwrap().model.as_deref(), Some("m"));
    // An event for a process that is gone already does no harm.
    assert_eq!(host.examine(u32::MAX).unwrap(), []);
}

#[test]
fn a_child_with_sockets_and_no_title_is_a_diffusion_stage() {
    let Some(python) = python() else { return };
    let mut tree = Tree::start(&python, &[], &["serve", "org/m", "--omni"]);
    let child = tree.ask("spawn a");
    let mut host = Host::new(Settings::default());
    host.scan().unwrap();
    assert_eq!(role(&host, child), None);
    tree.tell("a sockets");
    let stage = Role::DiffusionStage {
        stage: Some(0),
        replica: Some(0),
    };
    scan_until(&mut host, |host| role(host, child) == Some(stage));
}

#[test]
fn a_fork_with_its_parents_argv_is_a_coordinator() {
    let Some(python) = python() else { return };
    let mut tree = Tree::start(&python, &[], &["serve", "org/m", "--omni"]);
    let fork = tree.ask("fork c");
    let mut host = Host::new(Settings::default());
    host.scan().unwrap();
    assert_eq!(role(&host, fork), None);
    scan_until(&mut host, |host| role(host, fork) == Some(Role::Coordinator));
}

#[test]
fn a_pid_namespace_hides_nothing() {
    let Some(python) = python() else { return };
    let unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"];
    if !Command::new(unshare[0])
        .args(&unshare[1..])
        .arg("true")
        .status()
        .is_ok_and(|status| status.success())
    {
        eprintln!("SKIPPED: cannot make a PID namespace here");
        return;
    }
    let mut tree = Tree::start(&python, &unshare, &["serve", "org/m", "--omni"]);
    // Inside, the server is pid 1 and its child some small number.
    assert!(tree.ask("spawn a") < 100);
    tree.tell("a title VLLM::StageEngineCoreProc_stage3_replica2_DP0");
    let mut host = Host::new(Settings::default());
    let wrapper = tree.pid();
    let server = |host: &Host| {
        host.processes()
            .find(|p| p.parent == wrapper && p.role == Role::ApiServer)
            .map(|p| p.key.pid)
    };
    scan_until(&mut host, |host| {
        server(host).is_some_and(|server| {
            host.processes()
                .any(|p| p.parent == server && p.role == stage(3, 2))
        })
    });
    let server = server(&host).unwrap();
    assert_eq!(pipeline_of(&host, server).unwrap().root.pid, server);
}
