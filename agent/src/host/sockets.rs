//! TCP sockets of a process, and how to reach them from here.

use std::{
    collections::HashSet,
    fs, io,
    io::Read as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
};

use procfs::{
    net::{TcpNetEntry, TcpState},
    process::{FDTarget, Process},
};

/// Longest file of a network namespace that is read.
const MAX_NET: u64 = 1 << 20;

/// The addresses on which a process listens; none where they can't be read.
#[must_use]
pub fn listening(proc_root: &Path, pid: u32) -> Vec<SocketAddr> {
    own(proc_root, pid)
        .unwrap_or_default()
        .into_iter()
        .filter(|entry| entry.state == TcpState::Listen)
        .map(|entry| entry.local_address)
        .collect()
}

/// The addresses to which a process is connected; none where they can't be read.
#[must_use]
pub fn connected(proc_root: &Path, pid: u32) -> Vec<SocketAddr> {
    own(proc_root, pid)
        .unwrap_or_default()
        .into_iter()
        .filter(|entry| entry.state == TcpState::Established)
        .map(|entry| entry.remote_address)
        .collect()
}

fn own(proc_root: &Path, pid: u32) -> Result<Vec<TcpNetEntry>, procfs::ProcError> {
    let process = Process::new_with_root(proc_root.join(pid.to_string()))?;
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
    Ok(all.filter(|entry| own.contains(&entry.inode)).collect())
}

/// The network namespace of a process as seen from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// It is the agent's.
    Own,
    /// It is another; with an address of it that is not loopback, if it has one.
    Other(Option<IpAddr>),
}

impl Network {
    /// That of a process.
    #[must_use]
    pub fn of(proc_root: &Path, pid: u32) -> Self {
        let of = |pid: &str| fs::read_link(proc_root.join(pid).join("ns/net")).ok();
        let theirs = of(&pid.to_string());
        if theirs.is_some() && theirs == of("self") {
            Self::Own
        } else {
            Self::Other(address(&proc_root.join(pid.to_string())))
        }
    }

    /// The address to connect to, for a socket that is bound to `bound` there: loopback in the own namespace, an address
    /// of the pod in another. `None`: it can't be reached.
    #[must_use]
    pub fn reach(self, bound: SocketAddr) -> Option<SocketAddr> {
        let ip = match (bound.ip(), self) {
            (ip, Self::Other(address)) if ip.is_unspecified() => address?,
            (ip, Self::Other(_)) if ip.is_loopback() => return None,
            (IpAddr::V4(ip), _) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            // Python's servers bind such a socket for both, or for IPv6 alone.
            (IpAddr::V6(ip), _) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            (ip, _) => ip,
        };
        Some(SocketAddr::new(ip, bound.port()))
    }
}

/// An address of a process's network namespace that is not loopback.
fn address(process: &Path) -> Option<IpAddr> {
    let text = |name: &str| {
        let text = read(&process.join(name)).ok()?;
        Some(String::from_utf8_lossy(&text).into_owned())
    };
    let v4 = text("net/fib_trie").and_then(|trie| local_v4(&trie));
    let v6 = || text("net/if_inet6").and_then(|table| global_v6(&table));
    v4.map(IpAddr::V4).or_else(|| v6().map(IpAddr::V6))
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

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    fs::File::open(path)?.take(MAX_NET).read_to_end(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use rstest::rstest;

    use super::*;

    fn pod(ip: &str) -> Network {
        Network::Other(Some(ip.parse().unwrap()))
    }

    #[rstest]
    #[case::all_v4("0.0.0.0:80", Network::Own, Some("127.0.0.1:80"))]
    #[case::all_v6("[::]:80", Network::Own, Some("[::1]:80"))]
    #[case::loopback("127.0.0.1:80", Network::Own, Some("127.0.0.1:80"))]
    #[case::an_address_of_the_host("10.0.0.9:80", Network::Own, Some("10.0.0.9:80"))]
    #[case::all_in_a_pod("0.0.0.0:80", pod("10.1.2.3"), Some("10.1.2.3:80"))]
    #[case::loopback_in_a_pod("127.0.0.1:80", pod("10.1.2.3"), None)]
    #[case::loopback_v6_in_a_pod("[::1]:80", pod("10.1.2.3"), None)]
    #[case::an_address_of_a_pod("10.1.2.3:80", Network::Other(None), Some("10.1.2.3:80"))]
    #[case::a_pod_without_address("0.0.0.0:80", Network::Other(None), None)]
    fn addresses_in_reach(#[case] bound: &str, #[case] network: Network, #[case] expected: Option<&str>) {
        let reached = network.reach(bound.parse().unwrap());
        assert_eq!(reached, expected.map(|address| address.parse().unwrap()));
    }

    #[test]
    fn a_namespaces_address_is_read_from_its_routes() {
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
    fn own_sockets_are_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let _client = TcpStream::connect(address).unwrap();
        let (proc_root, pid) = (Path::new("/proc"), std::process::id());
        assert!(listening(proc_root, pid).contains(&address));
        assert!(connected(proc_root, pid).contains(&address));
        assert_eq!(Network::of(proc_root, pid), Network::Own);
        // No process has this id.
        assert!(listening(proc_root, u32::MAX).is_empty());
    }
}
