//! Where an API server listens: the sockets of its process, as /proc shows them.
//!
//! Only two kinds of address are ever given: loopback of the agent's own network namespace, and addresses of the pod or
//! host that the server runs in.

use std::{
    collections::HashSet,
    fs, io,
    io::Read as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
};

use procfs::{
    net::TcpState,
    process::{FDTarget, Process},
};

use super::sample::Failure;

/// The port that `vllm serve` takes unless told otherwise.
const DEFAULT_PORT: u16 = 8000;

/// Longest command line that is read.
const MAX_CMDLINE: u64 = 64 << 10;
/// Longest file of a network namespace that is read.
const MAX_NET: u64 = 1 << 20;

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

/// The address to connect to, for a socket that is bound to `bound`. `own_network`: it is in the agent's network
/// namespace; `pod`: an address of its own namespace that is not loopback.
pub fn reach(bound: SocketAddr, own_network: bool, pod: Option<IpAddr>) -> Result<SocketAddr, Failure> {
    let ip = match bound.ip() {
        ip if ip.is_unspecified() && !own_network => pod.ok_or(Failure::OutOfReach)?,
        ip if ip.is_loopback() && !own_network => return Err(Failure::OutOfReach),
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        // Python's servers bind such a socket for both, or for IPv6 alone.
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    Ok(SocketAddr::new(ip, bound.port()))
}

/// Finds the address of the API server among the sockets of `pids`; the first is the one with the command line.
pub fn find(proc_root: &Path, pids: &[u32]) -> Result<SocketAddr, Failure> {
    let root = *pids.first().ok_or(Failure::NoAddress)?;
    let cmdline = read(&proc_root.join(format!("{root}/cmdline")), MAX_CMDLINE).unwrap_or_default();
    let cmdline = String::from_utf8_lossy(&cmdline);
    let asked = Asked::from_args(cmdline.split('\0'));
    if asked.tls {
        return Err(Failure::Tls);
    }
    let mut listening = Vec::new();
    for pid in pids {
        if let Ok(found) = sockets(&proc_root.join(pid.to_string())) {
            listening.extend(found);
        }
    }
    listening.sort_unstable();
    listening.dedup();
    let bound = choose(&listening, &asked).ok_or(Failure::NoAddress)?;
    let network = |pid: &str| fs::read_link(proc_root.join(pid).join("ns/net")).ok();
    let theirs = network(&root.to_string());
    let own_network = theirs.is_some() && theirs == network("self");
    let pod = if own_network {
        None
    } else {
        pod_address(&proc_root.join(root.to_string()))
    };
    reach(bound, own_network, pod)
}

/// The addresses on which a process listens.
fn sockets(process: &Path) -> Result<Vec<SocketAddr>, procfs::ProcError> {
    let process = Process::new_with_root(PathBuf::from(process))?;
    let own: HashSet<u64> = process
        .fd()?
        .filter_map(|file| match file.ok()?.target {
            FDTarget::Socket(inode) => Some(inode),
            _ => None,
        })
        .collect();
    let all = process
        .tcp()
        .unwrap_or_default()
        .into_iter()
        .chain(process.tcp6().unwrap_or_default());
    Ok(all
        .filter(|entry| entry.state == TcpState::Listen && own.contains(&entry.inode))
        .map(|entry| entry.local_address)
        .collect())
}

/// An address of a process's network namespace that is not loopback.
fn pod_address(process: &Path) -> Option<IpAddr> {
    let v4 = read(&process.join("net/fib_trie"), MAX_NET).ok();
    let v6 = read(&process.join("net/if_inet6"), MAX_NET).ok();
    v4.and_then(|text| local_v4(&String::from_utf8_lossy(&text)))
        .map(IpAddr::V4)
        .or_else(|| {
            v6.and_then(|text| global_v6(&String::from_utf8_lossy(&text)))
                .map(IpAddr::V6)
        })
}

/// The first own address in the kernel's table of routes: a leaf of which the next line says that it is local.
fn local_v4(trie: &str) -> Option<Ipv4Addr> {
    let mut leaf = None;
    for line in trie.lines().map(str::trim) {
        if let Some(address) = line.strip_prefix("|-- ") {
            leaf = address.parse::<Ipv4Addr>().ok();
        } else if line == "/32 host LOCAL"
            && let Some(address) = leaf.filter(|address| !address.is_loopback())
        {
            return Some(address);
        }
    }
    None
}

/// The first address of global scope: `<32 hex digits> <index> <prefix> <scope> <flags> <device>`.
fn global_v6(table: &str) -> Option<Ipv6Addr> {
    table.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let address = u128::from_str_radix(fields.next()?, 16).ok()?;
        (fields.nth(2)? == "00").then(|| Ipv6Addr::from(address))
    })
}

fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    fs::File::open(path)?.take(limit).read_to_end(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

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

    #[rstest]
    #[case::all_v4("0.0.0.0:80", true, None, Ok("127.0.0.1:80"))]
    #[case::all_v6("[::]:80", true, None, Ok("[::1]:80"))]
    #[case::loopback("127.0.0.1:80", true, None, Ok("127.0.0.1:80"))]
    #[case::an_address_of_the_host("10.0.0.9:80", true, None, Ok("10.0.0.9:80"))]
    #[case::all_in_a_pod("0.0.0.0:80", false, Some("10.1.2.3"), Ok("10.1.2.3:80"))]
    #[case::loopback_in_a_pod("127.0.0.1:80", false, Some("10.1.2.3"), Err(Failure::OutOfReach))]
    #[case::an_address_of_a_pod("10.1.2.3:80", false, None, Ok("10.1.2.3:80"))]
    #[case::a_pod_without_address("0.0.0.0:80", false, None, Err(Failure::OutOfReach))]
    fn addresses_in_reach(
        #[case] bound: &str,
        #[case] own_network: bool,
        #[case] pod: Option<&str>,
        #[case] expected: Result<&str, Failure>,
    ) {
        let reached = reach(
            bound.parse().unwrap(),
            own_network,
            pod.map(|ip| ip.parse().unwrap()),
        );
        assert_eq!(reached, expected.map(|address| address.parse().unwrap()));
    }

    #[test]
    fn the_pods_address_is_read_from_its_routes() {
        let trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n     \
                    +-- 10.1.0.0/16 2 0 2\n        |-- 10.1.0.0\n           /16 link UNICAST\n        \
                    |-- 127.0.0.1\n           /32 host LOCAL\n        |-- 10.1.2.3\n           /32 host LOCAL\n";
        assert_eq!(local_v4(trie), Some(Ipv4Addr::new(10, 1, 2, 3)));
        assert_eq!(local_v4("rubbish"), None);
        let table = "00000000000000000000000000000001 01 80 10 80 lo\n\
                     fe800000000000000042acfffe110002 0a 40 20 80 eth0\n\
                     fd000000000000000000000000000007 0a 40 00 80 eth0\n";
        assert_eq!(global_v6(table), Some("fd00::7".parse().unwrap()));
        assert_eq!(global_v6("zz"), None);
    }

    #[test]
    fn own_listeners_are_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let found = sockets(Path::new("/proc/self")).unwrap();
        assert!(found.contains(&address), "{address} is not in {found:?}");
    }
}
