//! The status page in headless Chromium: with nothing found, under load, and with a stage that has died.

use std::{path::PathBuf, process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use omnitap_tests::{
    agent::Agent,
    pipeline::{Options, Pipeline},
};
use serde_json::{Value, json};

/// Looks at the page of an agent; keeps the picture under target/page. `None`: there is no Chromium here.
fn look(agent: &Agent, picture: &str, arguments: &[&str]) -> Result<Option<Value>> {
    let dir = omnitap_tests::target_dir().join("page");
    std::fs::create_dir_all(&dir)?;
    let python: PathBuf = omnitap_tests::python().context("no Python")?;
    let output = Command::new(python)
        .arg("-B")
        .arg(omnitap_tests::root().join("tests/page/look.py"))
        .arg(agent.url())
        .arg(dir.join(format!("{picture}.png")))
        .args(arguments)
        .output()?;
    let told = String::from_utf8_lossy(&output.stderr);
    if told.contains("No such file or directory: 'chromium'") {
        omnitap_tests::skip("no Chromium: `apt-get install chromium`")?;
        return Ok(None);
    }
    ensure!(output.status.success(), "{told}");
    let seen: Value = serde_json::from_slice(&output.stdout)?;
    assert_eq!(seen["errors"], json!([]), "errors of the script");
    assert_eq!(seen["wide"], json!(false), "the page is wider than the window");
    for url in seen["requests"].as_array().context("no requests")? {
        let url = url.as_str().unwrap_or_default();
        assert!(url.starts_with(&agent.url()) || url.starts_with("data:"), "{url}");
    }
    Ok(Some(seen))
}

fn text(seen: &Value) -> String {
    seen["text"].as_str().unwrap_or_default().to_owned()
}

fn has_node(seen: &Value, name: &str) -> bool {
    seen["nodes"].as_array().is_some_and(|nodes| {
        nodes
            .iter()
            .any(|node| node.as_str().is_some_and(|node| node.starts_with(name)))
    })
}

#[test]
fn the_page_shows_what_runs() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let agent = Agent::start(&[])?;
    let scenario = json!({
        "stages": [{"kind": "ar", "step_ms": 20}, {"kind": "generation", "step_ms": 20}],
        "phases": [
            {"requests": [{"repeat": 90, "every": 0.1, "stages": [
                {"tokens": 10, "payloads": [{"bytes": 65536}]},
                {"prompt": 5, "chunks": [{"frames": 4800}]}
            ]}]},
            {
                "requests": [{"stages": [{"tokens": 50}, {"prompt": 5, "chunks": [{"frames": 4800}]}]}],
                "acts": [{"do": "kill", "stage": 1, "at": 0.2}]
            }
        ]
    });
    let mut options = Options::omni("<b>page</b>");
    options.truth = false;
    let model = options.model.clone();
    let mut pipeline = Pipeline::start(options, &scenario)?;
    pipeline.go()?;
    let Some(seen) = look(
        &agent,
        "load",
        &["--seconds", "6", "--keys", "Tab,Tab,Tab,Tab,Tab,Tab,Tab"],
    )?
    else {
        return Ok(());
    };
    let words = text(&seen);
    // As text, not as an element.
    assert!(words.contains(&model), "{words}");
    assert!(
        words.contains("ready") && words.contains("The agent itself"),
        "{words}"
    );
    assert!(
        has_node(&seen, "stage 0, replica 0") && has_node(&seen, "stage 1, replica 0"),
        "{seen:#}"
    );
    assert!(has_node(&seen, "API server"), "{seen:#}");
    assert!(
        seen["focus"].as_str().is_some_and(|focus| !focus.is_empty()),
        "the keyboard leads nowhere"
    );
    pipeline.ended()?;
    pipeline.go()?;
    std::thread::sleep(Duration::from_secs(2));
    let Some(seen) = look(&agent, "dead-stage", &["--seconds", "4", "--dark"])? else {
        return Ok(());
    };
    let words = text(&seen);
    assert!(
        words.contains("has ended, and no other has taken its place"),
        "{words}"
    );
    assert!(words.contains("Look at the pipeline's own log."), "{words}");
    drop(pipeline);
    Ok(())
}

/// Without the tap, and in a PID namespace without pipelines nothing is found whatever else runs on this machine.
#[test]
fn the_page_says_what_to_do_when_nothing_is_found() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let wrapper = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "--"].map(str::to_owned);
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let binary = omnitap_tests::agent::binary()?;
    let agent = Agent::start_under(&wrapper, &binary, port, "run", &["--no-ebpf"])?;
    let Some(seen) = look(&agent, "empty", &["--seconds", "3"])? else {
        return Ok(());
    };
    let words = text(&seen);
    assert!(words.contains("No pipeline found on this host"), "{words}");
    assert!(
        words.contains("omnitap check") && words.contains("hostPID: true"),
        "{words}"
    );
    Ok(())
}
