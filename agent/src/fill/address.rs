//! Where an API server listens: the sockets of its process, as /proc shows them.
//!
//! Only two kinds of address are ever given: loopback of the agent's own network namespace, and addresses of the pod or
//! host that the server runs in.

use std::{fs, io::Read as _, net::SocketAddr, path::Path};

use super::sample::Failure;
use crate::host::sockets::{self, Network};

/// The port that `vllm serve` takes unless told otherwise.
const DEFAULT_PORT: u16 = 8000;

/// Longest command line that is read.
const MAX_CMDLINE: u64 = 64 << 10;

/// What the command line says of the server's address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// `--port`.
    pub port: Option<u16>,
    /// It serves HTTPS.
    pub tls: bool,
}

impl Asked {
    /// Reads it from arguments.
    #[must_use]
    pub fn from_args<'a>(args: impl Iterator<Item = &'a str>) -> Self {
        let mut asked = Self {
            port: None,
            tls: false,
        };
        let mut args = args.peekable();
        while let Some(arg) = args.next() {
            let (name, value) = match arg.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (arg, args.peek().copied()),
            };
            match name {
                "--port" => asked.port = value.and_then(|port| port.parse().ok()).or(asked.port),
                "--ssl-certfile" | "--ssl-keyfile" => asked.tls = true,
                _ => {}
            }
        }
        asked
    }
}

/// Chooses the socket that serves HTTP among those that listen: the one with the port of the command line, else with the
/// default port, else the only one.
#[must_use]
pub fn choose(listening: &[SocketAddr], asked: &Asked) -> Option<SocketAddr> {
    let with = |port| listening.iter().find(|address| address.port() == port).copied();
    match (asked.port, listening) {
        (Some(port), _) if port != 0 => with(port),
        (_, [only]) => Some(*only),
        _ => with(DEFAULT_PORT),
    }
}

/// Finds the address of the API server among the sockets of `pids`; the first is the one with the command line.
pub fn find(proc_root: &Path, pids: &[u32]) -> Result<SocketAddr, Failure> {
    let root = *pids.first().ok_or(Failure::NoAddress)?;
    let mut cmdline = Vec::new();
    // What can't be read names no port.
    drop(
        fs::File::open(proc_root.join(format!("{root}/cmdline")))
            .and_then(|file| file.take(MAX_CMDLINE).read_to_end(&mut cmdline)),
    );
    let cmdline = String::from_utf8_lossy(&cmdline);
    let asked = Asked::from_args(cmdline.split('\0'));
    if asked.tls {
        return Err(Failure::Tls);
    }
    let mut listening: Vec<SocketAddr> = pids
        .iter()
        .flat_map(|pid| sockets::listening(proc_root, *pid))
        .collect();
    listening.sort_unstable();
    listening.dedup();
    let bound = choose(&listening, &asked).ok_or(Failure::NoAddress)?;
    Network::of(proc_root, root)
        .reach(bound)
        .ok_or(Failure::OutOfReach)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::nothing("vllm serve m", None, false)]
    #[case::port("vllm serve m --port 8123", Some(8123), false)]
    #[case::port_with_equals("vllm serve m --port=8123 --host 0.0.0.0", Some(8123), false)]
    #[case::last_counts("vllm serve --port 1 --port 2", Some(2), false)]
    #[case::no_number("vllm serve --port x", None, false)]
    #[case::no_value("vllm serve --port", None, false)]
    #[case::tls("vllm serve m --ssl-keyfile k --ssl-certfile=c", None, true)]
    fn command_lines(#[case] line: &str, #[case] port: Option<u16>, #[case] tls: bool) {
        assert_eq!(Asked::from_args(line.split(' ')), Asked { port, tls });
    }

    #[rstest]
    #[case::asked(&["0.0.0.0:8123", "127.0.0.1:5000"], Some(8123), Some("0.0.0.0:8123"))]
    #[case::asked_but_not_there(&["127.0.0.1:5000"], Some(8123), None)]
    #[case::any_free_port(&["127.0.0.1:5000"], Some(0), Some("127.0.0.1:5000"))]
    #[case::the_only_one(&["127.0.0.1:5000"], None, Some("127.0.0.1:5000"))]
    #[case::default_port(&["127.0.0.1:5000", "[::]:8000"], None, Some("[::]:8000"))]
    #[case::several(&["127.0.0.1:5000", "127.0.0.1:5001"], None, None)]
    #[case::none(&[], None, None)]
    fn sockets_are_chosen(
        #[case] listening: &[&str],
        #[case] port: Option<u16>,
        #[case] expected: Option<&str>,
    ) {
        let listening: Vec<SocketAddr> = listening.iter().map(|a| a.parse().unwrap()).collect();
        let chosen = choose(&listening, &Asked { port, tls: false });
        assert_eq!(chosen, expected.map(|a| a.parse().unwrap()));
    }
}
