//! The HTTP server over real sockets.

#![expect(clippy::unwrap_used, reason = "a failure in a helper is a failed test")]

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::{fs::PermissionsExt as _, net::UnixStream},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use omnitap::{
    config::ListenAddress,
    host::identity::{Change, Flavor, Pipeline, PipelineId, Process, ProcessKey, Role, Versions},
    metrics::registry::{Limits, Registry},
    serve::{Content, Server, Settings, Status, TapState},
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
    start_with(max_connections, None).await
}

/// On a free port of this machine.
fn settings(listen: Vec<ListenAddress>, max_connections: u32) -> Settings {
    Settings {
        listen,
        max_connections,
        web_config: None,
    }
}

async fn start_with(max_connections: u32, web_config: Option<PathBuf>) -> Running {
    let registry = Registry::new(Limits {
        max_series: 10_000,
        retention: Duration::from_mins(15),
    });
    let status = Status::default();
    let content = Content {
        exposition: registry.exposition(),
        own: registry.own(),
        status: status.clone(),
        requests: None,
    };
    let settings = Settings {
        web_config,
        ..settings(vec![localhost(0)], max_connections)
    };
    let server = Server::bind(&settings, content).await.unwrap();
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
    ListenAddress::Tcp {
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

#[rstest]
#[case::page("/", "text/html; charset=utf-8")]
#[case::style("/page.css", "text/css; charset=utf-8")]
#[case::script("/page.js", "text/javascript; charset=utf-8")]
#[tokio::test]
async fn the_page_loads_nothing_from_elsewhere(#[case] path: &str, #[case] kind: &str) {
    let running = start(8).await;
    let answer = get(running.address, path, "").await;
    assert_eq!((answer.status, answer.header("content-type")), (200, Some(kind)));
    let policy = answer.header("content-security-policy").unwrap();
    assert!(
        policy.starts_with("default-src 'none'") && !policy.contains("unsafe"),
        "{policy}"
    );
    assert!(!answer.text().contains("//cdn") && !answer.text().contains("innerHTML"));
}

#[tokio::test]
async fn the_status_has_pipelines_processes_and_figures() {
    let running = start(8).await;
    let root = ProcessKey {
        pid: 4711,
        start_ticks: 1,
    };
    running.status.set_tap(TapState::Up);
    running.status.change(&Change::Pipeline(Pipeline {
        id: PipelineId(3),
        flavor: Flavor::Omni,
        model: Some("<script>\"m\"</script>".into()),
        served_model: None,
        versions: Versions::default(),
        max_model_len: None,
        root,
    }));
    running.status.change(&Change::Process(Process {
        key: root,
        parent: 1,
        role: Role::ApiServer,
        pipeline: PipelineId(3),
        container: None,
    }));
    running.status.probed(root, "frames", Err("denied".to_owned()));
    let answer = get(running.address, "/api/status", "").await;
    assert_eq!(answer.header("content-type"), Some("application/json"));
    let found: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(found["not_ready"], "the first scan of the host is not done");
    let pipeline = &found["pipelines"][0];
    assert_eq!((&pipeline["id"], &pipeline["pid"]), (&3.into(), &4711.into()));
    assert_eq!(pipeline["model"], "<script>\"m\"</script>");
    assert_eq!(pipeline["processes"][0]["probes"]["frames"], "denied");
    let warning = found["warnings"][0]["text"].as_str().unwrap();
    assert!(warning.ends_with("has no probes for frames: denied"), "{warning}");
    assert!(found["families"]["omnitap_series"][0]["value"].as_f64().unwrap() > 1.0);
    assert_eq!(found["bounds"]["vllm_omni:audio_rtf"][0], 0.1);
}

/// Reads an answer of `/healthz` that leaves the connection open.
fn healthy(stream: &mut (impl Read + Write)) -> bool {
    stream
        .write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        .is_ok()
        && {
            let mut answer = Vec::new();
            let mut bytes = [0; 1024];
            while !answer.ends_with(b"ok\n") {
                match stream.read(&mut bytes) {
                    Ok(0) | Err(_) => return false,
                    Ok(n) => answer.extend_from_slice(&bytes[..n]),
                }
            }
            answer.starts_with(b"HTTP/1.1 200")
        }
}

#[tokio::test]
async fn connections_are_kept_and_the_one_that_rests_longest_makes_room() {
    let running = start(2).await;
    let address = running.address;
    let held = tokio::task::spawn_blocking(move || {
        let mut held: Vec<TcpStream> = (0..2).map(|_| TcpStream::connect(address).unwrap()).collect();
        for stream in &mut held {
            // Two requests on one connection.
            assert!(healthy(stream) && healthy(stream));
        }
        let mut third = TcpStream::connect(address).unwrap();
        assert!(healthy(&mut third));
        assert!(!healthy(&mut held[0]), "the oldest is still served");
        assert!(healthy(&mut held[1]) && healthy(&mut third));
        (held, third)
    })
    .await
    .unwrap();
    let text = get(address, "/metrics", "").await.text();
    assert!(
        text.contains("\nomnitap_http_connections_refused_total 2.0\n"),
        "the third, and this one: {text}"
    );
    drop(held);
}

/// A client with many connections that never end their requests is no trouble to others.
#[tokio::test]
async fn half_sent_requests_hold_up_nobody() {
    let running = start(64).await;
    let address = running.address;
    let held = tokio::task::spawn_blocking(move || {
        let half = |_| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHos").unwrap();
            stream
        };
        (0..80).map(half).collect::<Vec<_>>()
    })
    .await
    .unwrap();
    let start = Instant::now();
    for _ in 0..20 {
        assert_eq!(get(address, "/metrics", "").await.status, 200);
    }
    // Not a measure of speed: a half-sent request has 5 s, and none of these waited for one.
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    drop(held);
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
        requests: None,
    };
    let error = Server::bind(&settings(vec![localhost(0), localhost(port)], 1), content)
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
        requests: None,
    };
    let everywhere = ListenAddress::Tcp { host: None, port: 0 };
    let server = Server::bind(&settings(vec![localhost(0), everywhere], 8), content)
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

fn password_file(dir: &Path, rest: &str) -> PathBuf {
    let path = dir.join("web.yml");
    let hash = bcrypt::hash("right", 4).unwrap();
    std::fs::write(&path, format!("basic_auth_users:\n  scraper: {hash}\n{rest}")).unwrap();
    path
}

/// `scraper:right`, `scraper:wrong` and `nobody:right` in base64.
const RIGHT: &str = "Authorization: Basic c2NyYXBlcjpyaWdodA==\r\n";
const WRONG: &str = "Authorization: Basic c2NyYXBlcjp3cm9uZw==\r\n";
const NOBODY: &str = "Authorization: Basic bm9ib2R5OnJpZ2h0\r\n";

#[rstest]
#[case::right("/metrics", RIGHT, 200)]
#[case::wrong("/metrics", WRONG, 401)]
#[case::unknown_user("/metrics", NOBODY, 401)]
#[case::nothing("/metrics", "", 401)]
#[case::page("/", "", 401)]
#[case::paths_are_not_told("/secret", "", 401)]
#[case::unknown_path("/secret", RIGHT, 404)]
#[case::health("/healthz", "", 200)]
#[tokio::test]
async fn a_password_guards_the_data(#[case] path: &str, #[case] header: &str, #[case] wanted: u16) {
    let dir = tempfile::tempdir().unwrap();
    let running = start_with(8, Some(password_file(dir.path(), ""))).await;
    // Twice: the second time what was right is known.
    for _ in 0..2 {
        let answer = get(running.address, path, header).await;
        assert_eq!(answer.status, wanted);
        assert_eq!(answer.header("www-authenticate").is_some(), wanted == 401);
    }
}

#[tokio::test]
async fn a_changed_file_counts_and_a_broken_one_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = password_file(dir.path(), "");
    let running = start_with(8, Some(path.clone())).await;
    let address = running.address;
    assert_eq!(get(address, "/metrics", RIGHT).await.status, 200);
    std::fs::write(&path, "basic_auth_users: [").unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(get(address, "/metrics", RIGHT).await.status, 200);
    let hash = bcrypt::hash("wrong", 4).unwrap();
    std::fs::write(&path, format!("basic_auth_users: {{scraper: {hash}}}")).unwrap();
    for _ in 0..100 {
        if get(address, "/metrics", WRONG).await.status == 200 {
            assert_eq!(get(address, "/metrics", RIGHT).await.status, 401);
            return;
        }
    }
    panic!("the new password does not count");
}

#[tokio::test]
async fn headers_and_the_limit_on_requests_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("web.yml");
    let text = "http_server_config:\n  http2: false\n  headers:\n    X-Frame-Options: deny\n\
                rate_limit: {interval: 1h, burst: 2}\n";
    std::fs::write(&path, text).unwrap();
    let running = start_with(8, Some(path)).await;
    let mut statuses = Vec::new();
    for _ in 0..3 {
        let answer = get(running.address, "/metrics", "").await;
        assert_eq!(answer.header("x-frame-options"), Some("deny"));
        statuses.push(answer.status);
    }
    assert_eq!(statuses, [200, 200, 429]);
    assert_eq!(get(running.address, "/healthz", "").await.status, 200);
}

/// An authority, and a certificate of its own for `localhost`, as PEM.
fn certificate(name: &str) -> (String, String, String) {
    let mut authority = rcgen::CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority_key = rcgen::KeyPair::generate().unwrap();
    let authority_pem = authority.self_signed(&authority_key).unwrap().pem();
    let issuer = rcgen::Issuer::new(authority, authority_key);
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
    let pem = params.signed_by(&key, &issuer).unwrap().pem();
    (authority_pem, pem, key.serialize_pem())
}

/// What a TLS client with these versions and this certificate gets from `/healthz`.
async fn by_tls(
    address: SocketAddr,
    authority: &str,
    versions: &'static [&'static rustls::SupportedProtocolVersion],
    own: Option<(String, String)>,
) -> std::io::Result<bool> {
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
    let mut roots = rustls::RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(authority.as_bytes()).unwrap())
        .unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(roots);
    let config = match own {
        None => builder.with_no_client_auth(),
        Some((chain, key)) => builder
            .with_client_auth_cert(
                vec![CertificateDer::from_pem_slice(chain.as_bytes()).unwrap()],
                PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
            )
            .unwrap(),
    };
    tokio::task::spawn_blocking(move || {
        let name = "localhost".try_into().unwrap();
        let client = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
        let stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        let mut stream = rustls::StreamOwned::new(client, stream);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock)?;
        }
        Ok(healthy(&mut stream))
    })
    .await
    .unwrap()
}

static BOTH: &[&rustls::SupportedProtocolVersion] = &[&rustls::version::TLS12, &rustls::version::TLS13];
static OLD: &[&rustls::SupportedProtocolVersion] = &[&rustls::version::TLS12];

#[tokio::test]
async fn tls_with_a_least_version_and_a_renewed_certificate() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    let (authority, chain, key) = certificate("localhost");
    write("tls.crt", &chain);
    write("tls.key", &key);
    write(
        "web.yml",
        "tls_server_config: {cert_file: tls.crt, key_file: tls.key, min_version: TLS13}",
    );
    let running = start_with(8, Some(dir.path().join("web.yml"))).await;
    let address = running.address;
    assert!(by_tls(address, &authority, BOTH, None).await.unwrap());
    assert!(by_tls(address, &authority, OLD, None).await.is_err());
    let (other, chain, key) = certificate("localhost");
    assert!(by_tls(address, &other, BOTH, None).await.is_err());
    // A key that does not fit yet changes nothing.
    write("tls.crt", &chain);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(by_tls(address, &authority, BOTH, None).await.unwrap());
    write("tls.key", &key);
    for _ in 0..100 {
        if by_tls(address, &other, BOTH, None).await.is_ok_and(|ok| ok) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("the new certificate is not served");
}

#[tokio::test]
async fn clients_show_certificates_of_their_authority() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    let (authority, chain, key) = certificate("localhost");
    let (clients, client_chain, client_key) = certificate("prometheus");
    let (_, stranger_chain, stranger_key) = certificate("prometheus");
    write("tls.crt", &chain);
    write("tls.key", &key);
    write("clients.crt", &clients);
    write(
        "web.yml",
        "tls_server_config:\n  cert_file: tls.crt\n  key_file: tls.key\n  client_ca_file: clients.crt\n\
         \x20 client_auth_type: RequireAndVerifyClientCert\n  max_version: TLS12\n\
         \x20 cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256]\n  curve_preferences: [CurveP256]\n",
    );
    let running = start_with(8, Some(dir.path().join("web.yml"))).await;
    let try_as = |own| by_tls(running.address, &authority, BOTH, own);
    assert!(try_as(Some((client_chain, client_key))).await.unwrap());
    assert!(
        !try_as(Some((stranger_chain, stranger_key)))
            .await
            .is_ok_and(|ok| ok)
    );
    assert!(!try_as(None).await.is_ok_and(|ok| ok));
}

#[rstest]
#[case::not_the_format("basic_auth: {}", "unknown field")]
#[case::no_hash("basic_auth_users: {a: secret}", "no bcrypt hash")]
#[case::too_dear(
    "basic_auth_users: {a: $2y$31$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG}",
    "cost 31"
)]
#[case::no_certificate("tls_server_config: {cert_file: missing.crt, key_file: k}", "missing.crt")]
#[case::no_file_given(
    "tls_server_config: {client_auth_type: RequireAndVerifyClientCert}",
    "no certificate"
)]
#[case::header("http_server_config: {headers: {Server: x}}", "`Server` can't be set")]
#[case::header_value("http_server_config: {headers: {X-Frame-Options: allow}}", "can't be `allow`")]
#[case::no_burst("rate_limit: {interval: 1s}", "a burst of 0")]
#[case::no_interval("rate_limit: {interval: soon, burst: 1}", "interval `soon`")]
#[tokio::test]
async fn a_file_that_is_wrong_is_an_error_with_its_place(#[case] text: &str, #[case] wanted: &str) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("web.yml");
    std::fs::write(&path, text).unwrap();
    let error = bind_error(path).await;
    assert!(
        error.starts_with("web.config.file: ") && error.contains(wanted),
        "{error}"
    );
}

#[rstest]
#[case::authority_without_policy("client_ca_file: tls.crt", "RequireAndVerifyClientCert is needed")]
#[case::unverified("client_auth_type: RequireAnyClientCert", "verifies nothing")]
#[case::nobody_to_trust("client_auth_type: VerifyClientCertIfGiven", "needed to verify clients")]
#[case::names("client_allowed_sans: [a]", "not supported")]
#[case::old_version("max_version: TLS11", "not one of TLS12, TLS13")]
#[case::no_version("{min_version: TLS13, max_version: TLS12}", "lower than min_version")]
#[case::weak_suite("cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]", "not supported")]
#[case::curve("curve_preferences: [CurveP521]", "not supported")]
#[case::twice("cert: x", "given as text and as a file")]
#[tokio::test]
async fn tls_that_can_not_be_given_is_an_error(#[case] more: &str, #[case] wanted: &str) {
    let dir = tempfile::tempdir().unwrap();
    let (_, chain, key) = certificate("localhost");
    std::fs::write(dir.path().join("tls.crt"), chain).unwrap();
    std::fs::write(dir.path().join("tls.key"), key).unwrap();
    let path = dir.path().join("web.yml");
    let more = more.trim_matches(['{', '}']);
    let text = format!("tls_server_config: {{cert_file: tls.crt, key_file: tls.key, {more}}}");
    std::fs::write(&path, text).unwrap();
    let error = bind_error(path).await;
    assert!(error.contains(wanted), "{error}");
}

async fn bind_error(web_config: PathBuf) -> String {
    let registry = Registry::new(Limits {
        max_series: 1,
        retention: Duration::ZERO,
    });
    let content = Content {
        exposition: registry.exposition(),
        own: registry.own(),
        status: Status::default(),
        requests: None,
    };
    let settings = Settings {
        web_config: Some(web_config),
        ..settings(vec![localhost(0)], 1)
    };
    Server::bind(&settings, content).await.unwrap_err().to_string()
}

#[tokio::test]
async fn a_unix_socket_serves_those_who_may_open_it() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("http.sock");
    // What a killed agent leaves.
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let registry = Registry::new(Limits {
        max_series: 1,
        retention: Duration::ZERO,
    });
    let content = Content {
        exposition: registry.exposition(),
        own: registry.own(),
        status: Status::default(),
        requests: None,
    };
    let unix = ListenAddress::Unix(socket.clone());
    let guarded = Settings {
        web_config: Some(password_file(dir.path(), "")),
        ..settings(vec![unix.clone()], 8)
    };
    let server = Server::bind(&guarded, content.clone()).await.unwrap();
    assert_eq!(
        std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777,
        0o660
    );
    let taken = Server::bind(&settings(vec![unix], 8), content).await.unwrap_err();
    assert!(taken.to_string().contains("another process"), "{taken}");
    let (stop, stopped) = oneshot::channel::<()>();
    let done = tokio::spawn(server.run(async move { drop(stopped.await) }, Duration::from_secs(5)));
    let path = socket.clone();
    let answer = tokio::task::spawn_blocking(move || {
        let mut stream = UnixStream::connect(path).unwrap();
        stream
            .write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    });
    assert!(answer.await.unwrap().starts_with("HTTP/1.1 200"));
    stop.send(()).unwrap();
    done.await.unwrap();
    assert!(!socket.exists(), "the file of the socket is still there");
}
