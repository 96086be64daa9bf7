//! The HTTP server over real sockets.

#![expect(clippy::unwrap_used, reason = "a failure in a helper is a failed test")]

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

use omnitap::{
    config::ListenAddress,
    host::identity::{Flavor, Pipeline, PipelineId, ProcessKey, Versions},
    metrics::registry::{Limits, Registry},
    serve::{Content, Server, Status, TapState},
};
use rstest::rstest;
use tokio::{sync::oneshot, task::JoinHandle};

struct Running {
    address: SocketAddr,
    registry: Registry,
    status: Status,
    stop: oneshot::Sender<()>,
    done: JoinHandle<()>,
}

async fn start(max_connections: u32) -> Running {
    let registry = Registry::new(Limits {
        max_series: 10_000,
        retention: Duration::from_mins(15),
    });
    let status = Status::default();
    let content = Content {
        exposition: registry.exposition(),
        own: registry.own(),
        status: status.clone(),
    };
    let server = Server::bind(&[localhost(0)], max_connections, content)
        .await
        .unwrap();
    let address = server.addresses()[0];
    let (stop, stopped) = oneshot::channel();
    let done = tokio::spawn(server.run(
        async move {
            let _ = stopped.await;
        },
        Duration::from_secs(5),
    ));
    Running {
        address,
        registry,
        status,
        stop,
        done,
    }
}

fn localhost(port: u16) -> ListenAddress {
    ListenAddress {
        host: Some("127.0.0.1".into()),
        port,
    }
}

struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(": ")?;
            key.eq_ignore_ascii_case(name).then_some(value)
        })
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// Sends a request on a connection of its own.
async fn request(address: SocketAddr, request: &str) -> Answer {
    let request = request.to_owned();
    tokio::task::spawn_blocking(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        let end = bytes.windows(4).position(|w| w == b"\r\n\r\n").unwrap();
        let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
        Answer {
            status: head.split(' ').nth(1).unwrap().parse().unwrap(),
            head,
            body: bytes[end + 4..].to_vec(),
        }
    })
    .await
    .unwrap()
}

async fn get(address: SocketAddr, path: &str, headers: &str) -> Answer {
    request(
        address,
        &format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n"),
    )
    .await
}

#[tokio::test]
async fn metrics_come_as_text() {
    let running = start(8).await;
    let answer = get(running.address, "/metrics", "").await;
    assert_eq!(answer.status, 200);
    assert_eq!(
        answer.header("content-type"),
        Some("text/plain; version=0.0.4; charset=utf-8")
    );
    assert_eq!(
        answer.header("content-length"),
        Some(answer.body.len().to_string().as_str())
    );
    assert!(
        answer
            .text()
            .starts_with("# HELP vllm_omni:audio_continuity_ok_total ")
    );
    assert!(answer.text().contains("\nomnitap_build_info{"));
    drop(running.registry);
}

#[tokio::test]
async fn metrics_come_as_openmetrics_and_gzip_when_asked_for() {
    let running = start(8).await;
    let wanted =
        "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\nAccept-Encoding: gzip\r\n";
    let answer = get(running.address, "/metrics", wanted).await;
    assert_eq!(answer.header("content-encoding"), Some("gzip"));
    assert_eq!(
        answer.header("content-type"),
        Some("application/openmetrics-text; version=1.0.0; charset=utf-8")
    );
    let mut text = String::new();
    flate2::read::GzDecoder::new(&*answer.body)
        .read_to_string(&mut text)
        .unwrap();
    assert!(text.ends_with("# EOF\n"));
    assert!(text.contains("# TYPE vllm:prompt_tokens counter\n"));
}

#[tokio::test]
async fn a_scrape_is_measured() {
    let running = start(8).await;
    get(running.address, "/metrics", "").await;
    get(running.address, "/nothing", "").await;
    let text = get(running.address, "/metrics", "").await.text();
    assert!(
        text.contains("\nomnitap_scrape_duration_seconds_count 1.0\n"),
        "{text}"
    );
    assert!(text.contains("\nomnitap_http_requests_total{code=\"200\",path=\"/metrics\"} 1.0\n"));
    assert!(text.contains("\nomnitap_http_requests_total{code=\"404\",path=\"other\"} 1.0\n"));
    assert!(text.contains("\nomnitap_resident_memory_bytes "));
}

#[rstest]
#[case::get("GET", "/healthz", 200)]
#[case::head("HEAD", "/healthz", 200)]
#[case::head_metrics("HEAD", "/metrics", 200)]
#[case::head_page("HEAD", "/", 200)]
#[case::post("POST", "/metrics", 405)]
#[case::options("OPTIONS", "/", 405)]
#[case::delete("DELETE", "/readyz", 405)]
#[case::unknown_path("GET", "/metrics/", 404)]
#[case::unknown_path_and_method("POST", "/x", 404)]
#[case::query("GET", "/metrics?name[]=x", 200)]
#[tokio::test]
async fn paths_and_methods(#[case] method: &str, #[case] path: &str, #[case] status: u16) {
    let running = start(8).await;
    let head = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    let answer = request(running.address, &head).await;
    assert_eq!(answer.status, status, "{}", answer.head);
    assert_eq!(answer.header("allow").is_some(), status == 405);
    if method == "HEAD" {
        assert!(answer.body.is_empty());
        assert!(answer.header("content-length").is_some_and(|l| l != "0"));
    }
}

#[tokio::test]
async fn a_body_does_no_harm() {
    let running = start(8).await;
    let body = "x".repeat(100_000);
    let head = format!(
        "GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    assert_eq!(request(running.address, &head).await.status, 200);
}

#[tokio::test]
async fn a_head_that_is_too_long_is_refused() {
    let running = start(8).await;
    let answer = get(
        running.address,
        "/metrics",
        &format!("X: {}\r\n", "x".repeat(100_000)),
    )
    .await;
    assert_eq!(answer.status, 431);
}

#[tokio::test]
async fn ready_once_the_tap_is_up_and_the_host_was_scanned() {
    let running = start(8).await;
    let ready = async || {
        let answer = get(running.address, "/readyz", "").await;
        (answer.status, answer.text())
    };
    assert_eq!(
        ready().await,
        (503, "not ready: the tap is being loaded\n".into())
    );
    running.status.set_tap(TapState::Up);
    assert_eq!(
        ready().await,
        (503, "not ready: the first scan of the host is not done\n".into())
    );
    running.status.set_scanned();
    assert_eq!(ready().await, (200, "ready\n".into()));
    running.status.set_tap(TapState::Failed("no BTF".into()));
    assert_eq!(
        ready().await,
        (503, "not ready: the tap does not work: no BTF\n".into())
    );
    running.status.set_tap(TapState::Off);
    assert_eq!(ready().await.0, 200);
}

#[tokio::test]
async fn the_landing_page_shows_pipelines_and_trusts_no_name() {
    let running = start(8).await;
    running.status.set_pipelines(vec![Pipeline {
        id: PipelineId(3),
        flavor: Flavor::Omni,
        model: Some("<script>alert(1)</script>".into()),
        served_model: None,
        versions: Versions::default(),
        max_model_len: None,
        root: ProcessKey {
            pid: 4711,
            start_ticks: 1,
        },
    }]);
    let answer = get(running.address, "/", "").await;
    assert_eq!(answer.header("content-type"), Some("text/html; charset=utf-8"));
    let html = answer.text();
    assert!(html.contains("Pipelines found: 1"), "{html}");
    assert!(html.contains("href=\"/metrics\"") && html.contains("4711") && html.contains("unknown"));
    assert!(
        html.contains("&lt;script&gt;") && !html.contains("<script>"),
        "{html}"
    );
}

#[tokio::test]
async fn connections_are_kept_and_their_number_is_limited() {
    let running = start(2).await;
    let address = running.address;
    let held = tokio::task::spawn_blocking(move || {
        let mut held = Vec::new();
        for _ in 0..2 {
            let mut stream = TcpStream::connect(address).unwrap();
            // Two requests on one connection.
            for _ in 0..2 {
                stream
                    .write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                    .unwrap();
                let mut answer = [0; 16];
                stream.read_exact(&mut answer).unwrap();
                assert!(answer.starts_with(b"HTTP/1.1 200"));
                let mut rest = [0; 1024];
                assert!(stream.read(&mut rest).unwrap() > 0);
            }
            held.push(stream);
        }
        // No slot is left: this one is closed without an answer.
        let mut third = TcpStream::connect(address).unwrap();
        third.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut nothing = Vec::new();
        assert!(third.read_to_end(&mut nothing).is_ok_and(|n| n == 0));
        held
    })
    .await
    .unwrap();
    drop(held);
    // The slots come back.
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        let connected = tokio::task::spawn_blocking(move || {
            let mut stream = TcpStream::connect(address).unwrap();
            let _ = stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            answer.starts_with(b"HTTP/1.1 200")
        });
        if connected.await.unwrap() {
            return;
        }
    }
    panic!("no slot came back");
}

#[tokio::test]
async fn a_stop_ends_idle_connections_and_frees_the_port() {
    let running = start(8).await;
    let address = running.address;
    let idle = tokio::task::spawn_blocking(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream
            .write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            .unwrap();
        let mut answer = [0; 1024];
        assert!(stream.read(&mut answer).unwrap() > 0);
        stream
    })
    .await
    .unwrap();
    running.stop.send(()).unwrap();
    tokio::time::timeout(Duration::from_secs(4), running.done)
        .await
        .expect("the stop took the whole grace time")
        .unwrap();
    let end = tokio::task::spawn_blocking(move || {
        let mut idle = idle;
        let mut rest = Vec::new();
        idle.read_to_end(&mut rest)
    });
    assert!(end.await.unwrap().is_ok());
    assert!(TcpListener::bind(address).is_ok());
}

#[tokio::test]
async fn a_taken_port_is_said_with_its_address() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let registry = Registry::new(Limits {
        max_series: 1,
        retention: Duration::ZERO,
    });
    let content = Content {
        exposition: registry.exposition(),
        own: registry.own(),
        status: Status::default(),
    };
    let error = Server::bind(&[localhost(0), localhost(port)], 1, content)
        .await
        .unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with(&format!("cannot listen on 127.0.0.1:{port}: ")) && text.contains("another process"),
        "{text}"
    );
}

#[tokio::test]
async fn several_addresses_are_served() {
    let registry = Registry::new(Limits {
        max_series: 1,
        retention: Duration::ZERO,
    });
    let content = Content {
        exposition: registry.exposition(),
        own: registry.own(),
        status: Status::default(),
    };
    let everywhere = ListenAddress { host: None, port: 0 };
    let server = Server::bind(&[localhost(0), everywhere], 8, content)
        .await
        .unwrap();
    let ports: Vec<u16> = server.addresses().iter().map(SocketAddr::port).collect();
    tokio::spawn(server.run(std::future::pending(), Duration::ZERO));
    assert_eq!(ports.len(), 2);
    for port in ports {
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        assert_eq!(get(address, "/healthz", "").await.status, 200);
    }
}
