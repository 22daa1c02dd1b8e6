//! Policies of a cluster: loaded and promoted at the leader, and active at every next leader.

use std::{fs, path::Path};

use serde_json::Value as Json;
use statehouse_tests::{
    Admin, Browser, Cluster, Ran, assert_contains, cluster,
    command::{command, finish},
    policies, run, run_in,
    wait::until,
};

use crate::{
    SHORT_LEASE, eventually,
    resumed::{begin, resume},
};

/// Runs `statehouse policy …` on a host.
fn policy(cluster: &Cluster, host: usize, arguments: &[&str]) -> Ran {
    let data = cluster[host].data();
    run(&[&["policy"], arguments, &["--data", &data]].concat(), b"")
}

#[test]
fn promoted_policy_answers_on_the_next_leader() {
    let mut cluster = Cluster::with(2, 1, &[SHORT_LEASE]);
    let module = policies::marked("cluster");
    let leader = cluster.present_leader();
    policy(&cluster, leader.host, &["load", module.to_str().unwrap()]).code(0);
    policy(&cluster, leader.host, &["promote", "marked-cluster"]).code(0);
    let mut store = begin(&cluster[cluster.follower()], "client");
    let request = store.command(&["TALLY", "key"]);
    let packet_id = store.client.start(request.publish());
    let first = store.finish(&request, packet_id);
    assert_eq!(first.payload(), b"*3\r\n+cluster\r\n:1\r\n+cluster\r\n");

    let (_, new) = cluster.fail_over();
    let mut store = resume(&cluster[new.host], "client");
    let again = store.redeliver(&request, packet_id, true);
    assert_eq!(again.text(), first.text());
    // The redelivery counted nothing.
    let next = store.ask(&["TALLY", "key"]);
    assert_eq!(next.payload(), b"*3\r\n+cluster\r\n:2\r\n+cluster\r\n");
    let listing = policy(&cluster, new.host, &["list", "--json"]).code(0);
    let listing = listing.object();
    let policies = listing["policies"].as_array().unwrap().iter();
    let mut ours = policies.filter(|it| it["name"] == "marked-cluster");
    assert_eq!(ours.next().unwrap()["roles"][0], "active");
}

/// Regression: clusters of one name at different etcds were one target of orders, so an order that
/// was captured at one of them worked at the others.
#[test]
fn orders_name_the_cluster_with_its_id() {
    let keys = tempfile::tempdir().unwrap();
    let keygen = ["policy", "keygen", "trusted", "--json"];
    let made = run_in(keys.path(), &keygen).code(0).object();
    let trusted = ("trusted_keys", made["trusted_key"].as_str().unwrap());
    let mut cluster = Cluster::with(2, 1, &[SHORT_LEASE, trusted]);
    let status = cluster.ask(&["status", "--json"]).code(0).object();
    let store = status["store"].as_str().unwrap();
    let id = store.strip_prefix("plant7-").unwrap();
    assert!(id.len() == 16 && id.bytes().all(|it| it.is_ascii_hexdigit()));
    for host in 0..2 {
        cluster[host].wait_for_log(&format!("the name of this store is {store}"));
    }
    let push = |cluster: &Cluster, host: usize, store: &str, more: &[&str]| {
        let broker = format!("mqtt://{}", cluster[host].address());
        let push = ["policy", "push", "--broker", &broker, "--store", store];
        let all = [&push[..], &["--key", "trusted.key"], more].concat();
        run_in(keys.path(), &all)
    };
    let module = policies::marked("ordered");
    let promote = [module.to_str().unwrap(), "--promote"];
    push(&cluster, 0, cluster::NAME, &promote).fails(4, store);
    push(&cluster, 0, store, &promote).code(0);
    let (_, new) = cluster.fail_over();
    let list = policy(&cluster, new.host, &["list"]).code(0).text();
    assert!(list.contains(&format!("\nstore: {store}\n")), "{list}");
    push(&cluster, new.host, store, &["--rollback"]).code(0);
}

/// A host that joins later must get the file of the policy before it can lead.
#[test]
fn later_host_leads_with_the_promoted_policy() {
    let mut cluster = Cluster::with(1, 1, &[SHORT_LEASE]);
    let module = policies::marked("later");
    let leader = cluster.present_leader();
    let file = module.to_str().unwrap();
    policy(&cluster, leader.host, &["load", "--promote", file]).code(0);
    let later = cluster.add();
    cluster[later].wait_until_ready();
    let (_, new) = cluster.fail_over();
    assert_eq!(new.host, later);
    let answer = cluster.store(later, "client").ask(&["TALLY", "key"]);
    assert_eq!(answer.payload(), b"*3\r\n+later\r\n:1\r\n+later\r\n");
}

/// Policies that were unloaded must not fill etcd, which would then accept no further one.
#[test]
fn leader_removes_unused_policies_from_etcd() {
    let mut cluster = Cluster::with(2, 1, &[SHORT_LEASE]);
    let leader = cluster.present_leader();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("padded.wasm");
    let shown = file.to_str().unwrap();
    // Three of them take more than half of the room that policies may have.
    let marked = policies::marked("unused");
    for number in 0..3 {
        fs::write(&file, padded(&marked, number, 46 << 20)).unwrap();
        if number > 0 {
            policy(&cluster, leader.host, &["unload", "marked-unused"]).code(0);
        }
        policy(&cluster, leader.host, &["load", shown]).code(0);
    }
    cluster[leader.host].wait_for_log("removed policy modules without a use from etcd");
    let modules = format!("/statehouse/{}/0/module/", cluster::NAME);
    // Pieces of 1 MiB, and the built-in policy.
    assert_eq!(cluster.etcd.count_below(&modules), 47 + 1);

    // The present policy is there for every next leader, and one without files names no other.
    policy(&cluster, leader.host, &["promote", "marked-unused"]).code(0);
    let later = cluster.add();
    cluster[later].wait_until_ready();
    for host in cluster.followers() {
        if host != later {
            cluster[host].kill();
        }
    }
    let (_, new) = cluster.fail_over();
    assert_eq!(new.host, later);
    let answer = cluster.store(later, "client").ask(&["TALLY", "key"]);
    assert_eq!(answer.payload(), b"*3\r\n+unused\r\n:1\r\n+unused\r\n");
    let log = cluster[later].stderr().join("\n");
    assert!(!log.contains("is not here"), "{log}");
}

/// The module with a section of this many bytes that means nothing, so that its digest differs.
fn padded(module: &Path, number: u8, bytes: usize) -> Vec<u8> {
    let mut padded = fs::read(module).unwrap();
    // A custom section: 0, its length in LEB128, and its name.
    padded.push(0);
    let mut rest = bytes + 1;
    while rest > 0 {
        let more = if rest > 0x7f { 0x80 } else { 0 };
        padded.push((rest & 0x7f) as u8 | more);
        rest >>= 7;
    }
    padded.push(0);
    padded.resize(padded.len() + bytes, number);
    padded
}

#[test]
fn admin_api_of_a_follower_names_the_leader() {
    let token = ("admin_token", "one token for all hosts");
    let cluster = Cluster::with(2, 1, &[SHORT_LEASE, token]);
    let leader = cluster::name(cluster.present_leader().host);
    for host in 0..2 {
        until("the host is ready", || {
            Admin::of(&cluster[host]).ask("GET", "/readyz", b"").0 == 200
        });
    }
    let follower = cluster.follower();
    let admin = Admin::of(&cluster[follower]);
    let (status, body) = admin.ask("GET", "/v1/policies", b"");
    assert_eq!(status, 421, "{body}");
    // The page and its login work on every host. Keys are read and changed on the leader.
    assert_eq!(admin.ask("GET", "/", b"").0, 200);
    let begun = admin.done("POST", "/v1/session", b"");
    let session = admin.with_token(begun["session"].as_str().unwrap());
    assert_eq!(session.ask("GET", "/v1/session", b"").0, 200);
    for (method, path) in [("GET", "/v1/keys"), ("PUT", "/v1/key?key=k")] {
        assert_eq!(session.ask(method, path, b"v").0, 421, "{path}");
    }
    check_page_of_follower(&admin, &leader);
    let leading = Admin::of(&cluster[cluster.present_leader().host]);
    check_page_of_leader(&leading, &leader, &cluster::name(follower));
    leading.done("PUT", "/v1/key?key=k", b"v");
    assert_eq!(leading.done("GET", "/v1/key?key=k", b"")["value"], "v");
    // The past of a key is in the follower's own copy.
    let change = eventually("the follower has copied the change", || {
        let (status, body) = admin.ask("GET", "/v1/history?key=k", b"");
        let body: Json = serde_json::from_str(&body).unwrap();
        let change = body["changes"][0].clone();
        (status == 200 && !change.is_null()).then_some(change)
    });
    assert_eq!(change["value"], "v");
    let version = change["version"].as_str().unwrap();
    let past = format!("/v1/value?key=k&as_of={version}");
    assert_eq!(session.done("GET", &past, b"")["value"], "v");
    finds_the_leader(token.1, &admin, &leading);
    assert_contains!(body, &format!("use the admin API of {leader}"));
    // A policy of this size is refused before it is read, and the answer still arrives.
    for _ in 0..3 {
        let upload = admin.ask("POST", "/v1/policies", &vec![0; 8 << 20]);
        assert_eq!(upload.0, 421, "{}", upload.1);
    }
    let module = policies::marked("cluster");
    policy(&cluster, follower, &["load", module.to_str().unwrap()])
        .fails(4, &format!("use the admin API of {leader}"));
    let epoch = cluster.present_leader().epoch;
    hand_over_on_page(&leading);
    assert_eq!(cluster.wait_for_leader_after(epoch).host, follower);
}

/// A command with the addresses of several hosts is answered by the one that leads.
fn finds_the_leader(token: &str, follower: &Admin, leader: &Admin) {
    let listing = |hosts: &str| {
        let mut listing = command(&["policy", "list", "--admin", hosts]);
        listing.env("STATEHOUSE_ADMIN_TOKEN", token);
        finish(listing, b"")
    };
    let (follower, leader) = (follower.url(), leader.url());
    for hosts in [
        format!("{follower},{leader}"),
        format!("{leader},{follower}"),
    ] {
        let mut top = command(&["top", "--once", "--admin", &hosts]);
        top.env("STATEHOUSE_ADMIN_TOKEN", token);
        let shown = finish(top, b"").code(0).text();
        assert!(shown.contains("requests/s"), "{shown}");
    }
    let all = format!("http://127.0.0.1:1,{follower},{leader}");
    listing(&all).code(0);
    listing(&format!("{leader},{follower}")).code(0);
    listing(&follower).fails(4, "the address of each host");
    // The leader may have died.
    listing(&format!("{follower},http://127.0.0.1:1")).fails(3, "use the admin API of");
}

/// Opens the page of a host in a browser, and logs in.
fn page(host: &Admin) -> Browser {
    let mut browser = Browser::show(&format!("{}/#/overview", host.url()));
    browser.log_in(host.token());
    browser
}

/// In a browser, the page of the leader shows its cluster and can hand it over.
fn check_page_of_leader(leader: &Admin, own: &str, follower: &str) {
    let mut browser = page(leader);
    browser.see("requests/s");
    browser.evaluate("location.hash = '#/cluster'");
    let row = |name: &str, state: &str| {
        format!(
            "[...document.querySelectorAll('main.view-cluster tbody tr')].some((it) => it.innerText.includes('{name}') && it.innerText.includes('{state}'))"
        )
    };
    browser.wait(&row(own, "leads"));
    browser.wait(&row(follower, "follows"));
    let button = "[...document.querySelectorAll('main button')].some((it) => it.textContent === 'Hand over …' && it.offsetParent && !it.disabled)";
    browser.wait(button);
    // Each fact has a value.
    let text = browser.evaluate("document.querySelector('main').innerText");
    let text = text.as_str().unwrap();
    for wrong in ["NaN", "undefined", "null"] {
        assert!(!text.contains(wrong), "{text}");
    }
    let troubles = browser.troubles();
    assert!(troubles.is_empty(), "{troubles:#?}");
}

/// In a browser, the operator hands the cluster over.
fn hand_over_on_page(leader: &Admin) {
    let mut browser = page(leader);
    browser.see("requests/s");
    browser.evaluate("location.hash = '#/cluster'");
    for button in ["Hand over …", "Hand over"] {
        browser.click(button);
    }
    browser.see("This host has handed over.");
}

/// In a browser, the page of a follower shows who leads, and nothing fails but requests for figures
/// of the store.
fn check_page_of_follower(follower: &Admin, leader: &str) {
    let mut browser = page(follower);
    browser.wait("document.querySelectorAll('.gauge.is-empty').length === 4");
    browser.see(&format!("use the admin API of {leader}"));
    for view in ["keys", "cluster"] {
        browser.evaluate(&format!("location.hash = '#/{view}'"));
        browser.wait(&format!("document.querySelector('main.view-{view}')"));
        browser.wait(&format!(
            "document.querySelector('main').innerText.includes('{leader}')"
        ));
    }
    let troubles = browser.troubles();
    let other = troubles.iter().filter(|it| !it.contains("status of 421"));
    assert_eq!(other.count(), 0, "{troubles:#?}");
}
