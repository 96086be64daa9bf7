//! What a scrape of 10,000 sample lines takes over HTTP, alone and beside others, and what the lines cost in memory.
//!
//! Prints one JSON object for each case: times in milliseconds, memory in KiB.

mod content;

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use omnitap::{
    config::ListenAddress,
    serve::{Content, Server, Settings, Status},
};
use serde_json::json;

const SCRAPES: usize = 300;

/// One scrape on an open connection; returns the size of the body.
fn scrape(stream: &mut TcpStream, headers: &str, buffer: &mut Vec<u8>) -> std::io::Result<usize> {
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: x\r\n{headers}\r\n")?;
    buffer.clear();
    let mut chunk = vec![0; 64 << 10];
    loop {
        let read = stream.read(&mut chunk)?;
        buffer.extend_from_slice(chunk.get(..read).unwrap_or_default());
        let Some(end) = buffer.windows(4).position(|w| w == b"\r\n\r\n") else {
            continue;
        };
        let head = String::from_utf8_lossy(buffer.get(..end).unwrap_or_default()).to_lowercase();
        let length: usize = head
            .lines()
            .find_map(|l| l.strip_prefix("content-length: "))
            .and_then(|l| l.parse().ok())
            .unwrap_or(0);
        let mut left = (end + 4 + length).saturating_sub(buffer.len());
        while left > 0 {
            let read = stream.read(&mut chunk)?;
            left = left.saturating_sub(read);
            if read == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
        }
        return Ok(length);
    }
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .find_map(|l| l.strip_prefix("VmRSS:"))
        .and_then(|l| l.trim().strip_suffix(" kB"))
        .and_then(|l| l.parse().ok())
        .unwrap_or(0)
}

fn measure(address: SocketAddr, clients: usize, encoding: &str, headers: &str) -> std::io::Result<()> {
    let mut times: Vec<f64> = Vec::new();
    let mut bytes = 0;
    let all: Vec<std::io::Result<(Vec<f64>, usize)>> = std::thread::scope(|threads| {
        let running: Vec<_> = (0..clients)
            .map(|_| {
                threads.spawn(|| {
                    let mut stream = TcpStream::connect(address)?;
                    stream.set_nodelay(true)?;
                    let mut buffer = Vec::new();
                    let mut size = scrape(&mut stream, headers, &mut buffer)?;
                    let mut times = Vec::new();
                    for _ in 0..SCRAPES / clients {
                        let start = Instant::now();
                        size = scrape(&mut stream, headers, &mut buffer)?;
                        times.push(start.elapsed().as_secs_f64() * 1e3);
                        // Scrapers pause between scrapes; without it this would measure a queue.
                        std::thread::sleep(Duration::from_millis(10));
                    }
                    Ok((times, size))
                })
            })
            .collect();
        running.into_iter().filter_map(|t| t.join().ok()).collect()
    });
    for result in all {
        let (some, size) = result?;
        times.extend(some);
        bytes = size;
    }
    times.sort_by(f64::total_cmp);
    let at = |share: usize| times.get(times.len() * share / 100).copied().unwrap_or(f64::NAN);
    println!(
        "{}",
        json!({"clients": clients, "encoding": encoding, "bytes": bytes, "scrapes": times.len(),
               "p50_ms": at(50), "p99_ms": at(99), "rss_kib": resident_kib()})
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let before = resident_kib();
    let registry = content::registry();
    println!(
        "{}",
        json!({"lines": content::LINES, "rss_kib_before": before, "rss_kib_after": resident_kib()})
    );
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let content = Content {
        exposition: registry.exposition(),
        own: registry.own(),
        status: Status::default(),
        requests: None,
    };
    let address = ListenAddress::Tcp {
        host: Some("127.0.0.1".into()),
        port: 0,
    };
    let settings = Settings {
        listen: vec![address],
        max_connections: 64,
        web_config: None,
    };
    let server = runtime.block_on(Server::bind(&settings, content))?;
    let addresses = server.addresses();
    runtime.spawn(server.run(std::future::pending(), Duration::ZERO));
    for address in addresses {
        for clients in [1, 8] {
            measure(address, clients, "identity", "")?;
            measure(address, clients, "gzip", "Accept-Encoding: gzip\r\n")?;
        }
    }
    Ok(())
}
