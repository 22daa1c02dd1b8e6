//! Which requests the admin API admits.

use std::os::unix::fs::PermissionsExt;

use super::*;

fn headers(all: &[(HeaderName, &str)]) -> HeaderMap {
    let all = all.iter().cloned();
    all.map(|(name, value)| (name, value.parse().unwrap()))
        .collect()
}

/// The access at a TCP address, with the token `secret`.
fn with_token(address: [u8; 4]) -> Arc<Access> {
    let address = (address, 8080).into();
    Arc::new(Access::of_tcp(address, Some("secret"), None))
}

const PEER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 7);

async fn status(access: &Arc<Access>, all: &[(HeaderName, &str)]) -> u16 {
    let checked = access.check(&headers(all), PEER).await;
    checked.map_or_else(|denial| denial.status.as_u16(), |_| 200)
}

#[tokio::test]
async fn only_the_token_is_accepted_and_web_pages_are_refused() {
    let access = with_token([127, 0, 0, 1]);
    let host = || (HOST, "127.0.0.1:8080");
    for right in ["Bearer secret", "bearer secret"] {
        let answer = status(&access, &[host(), (AUTHORIZATION, right)]).await;
        assert_eq!(answer, 200, "{right}");
    }
    for wrong in [
        "Bearer secre",
        "Bearer secrets",
        "Bearer ",
        "secret",
        "Basic secret",
        "Basic YW5uYTpyaWdodA==",
    ] {
        let answer = status(&access, &[host(), (AUTHORIZATION, wrong)]).await;
        assert_eq!(answer, 401, "{wrong}");
    }
    assert_eq!(status(&access, &[host()]).await, 401);
    let right = (AUTHORIZATION, "Bearer secret");
    for other in ["store.example", "192.0.2.1:80", "localhost.example:80", ""] {
        let answer = status(&access, &[(HOST, other), right.clone()]).await;
        assert_eq!(answer, 403, "{other}");
    }
    assert_eq!(status(&access, std::slice::from_ref(&right)).await, 403);
    assert!(!access.is_remote() && !Access::of_socket().is_remote());
    // Beyond loopback any Host header is accepted.
    let access = with_token([0, 0, 0, 0]);
    assert!(access.is_remote() && Access::for_metrics().is_remote());
    let elsewhere = [(HOST, "store.example"), right];
    assert_eq!(status(&access, &elsewhere).await, 200);
    assert_eq!(status(&access, &elsewhere[..1]).await, 401);
}

#[tokio::test]
async fn only_the_page_of_this_address_is_accepted() {
    for access in [with_token([127, 0, 0, 1]), Arc::new(Access::of_socket())] {
        let ask = async |host: &'static str, further: &[(HeaderName, &'static str)]| {
            let own = [(HOST, host), (AUTHORIZATION, "Bearer secret")];
            status(&access, &[&own, further].concat()).await
        };
        for (host, origin, expected) in [
            ("127.0.0.1:8080", "http://127.0.0.1:8080", 200),
            ("localhost:8080", "http://localhost:8080", 200),
            ("localhost:8080", "http://127.0.0.1:8080", 403),
            ("127.0.0.1:8080", "https://127.0.0.1:8080", 403),
            ("127.0.0.1:8080", "http://127.0.0.1:8081", 403),
            ("127.0.0.1:8080", "http://127.0.0.1", 403),
            ("127.0.0.1:8080", "null", 403),
            ("127.0.0.1:8080", "", 403),
            ("evil.example", "http://evil.example", 403),
        ] {
            let status = ask(host, &[(ORIGIN, origin)]).await;
            assert_eq!(status, expected, "{origin} at {host}");
        }
        for (site, expected) in [
            ("same-origin", 200),
            ("none", 200),
            ("same-site", 403),
            ("cross-site", 403),
            ("", 403),
        ] {
            let status = ask("localhost:8080", &[(SEC_FETCH_SITE, site)]).await;
            assert_eq!(status, expected, "{site}");
        }
    }
}

#[tokio::test]
async fn a_session_replaces_the_token_until_it_ends() {
    let access = with_token([127, 0, 0, 1]);
    let check = async |shown: &str| {
        let shown = headers(&[(HOST, "localhost"), (AUTHORIZATION, shown)]);
        access.check(&shown, PEER).await
    };
    let by_token = check("Bearer secret")
        .await
        .unwrap_or_else(|it| panic!("{it:?}"));
    assert!(by_token.is_good() && by_token.about().expires_s.is_none());
    assert!(!by_token.end_session());
    let begun = by_token.begin_session().unwrap().unwrap();
    assert!(begun.session.starts_with(sessions::PREFIX) && begun.session.len() > 64);
    let bearer = format!("Bearer {}", begun.session);
    let operator = check(&bearer).await.unwrap_or_else(|it| panic!("{it:?}"));
    let again = operator.begin_session().unwrap();
    assert!(again.is_none(), "a session does not prolong itself");
    assert!(operator.is_good() && operator.end_session() && !operator.is_good());
    let denial = check(&bearer).await.err().unwrap();
    assert_eq!(denial.status, 401);
    assert!(denial.why.contains("log in again"), "{}", denial.why);
}

#[tokio::test]
async fn without_a_token_no_token_is_right() {
    let access = Arc::new(Access::of_tcp(([0, 0, 0, 0], 8080).into(), None, None));
    for shown in ["Bearer ", "Bearer x"] {
        assert_eq!(status(&access, &[(AUTHORIZATION, shown)]).await, 401);
    }
}

#[test]
fn a_header_that_may_occur_once_must_not_be_repeated() {
    let right = [
        (HOST, "127.0.0.1:8080"),
        (AUTHORIZATION, "Bearer secret"),
        (CONTENT_LENGTH, "0"),
    ];
    let of_page = [(ORIGIN, "http://127.0.0.1"), (SEC_FETCH_SITE, "none")];
    let single = [&right[..], &of_page].concat();
    Access::check_form(&headers(&single)).unwrap();
    for (name, second) in [
        (HOST, "evil.example"),
        (HOST, "127.0.0.1:8080"),
        (ORIGIN, "http://evil.example"),
        (AUTHORIZATION, "Bearer other"),
        (CONTENT_LENGTH, "1"),
        (SEC_FETCH_SITE, "same-origin"),
    ] {
        let twice = [&single[..], &[(name.clone(), second)]].concat();
        let refusal = Access::check_form(&headers(&twice)).unwrap_err();
        assert!(refusal.contains(name.as_str()), "{name}: {refusal}");
    }
}

#[test]
fn all_names_of_loopback_are_accepted() {
    for host in [
        "localhost",
        "LOCALHOST:1",
        "127.0.0.1",
        "127.1.2.3:80",
        "[::1]:80",
        "[::1]",
        "localhost:",
    ] {
        assert!(is_loopback(host), "{host}");
    }
    for host in [
        "",
        ":80",
        "[::2]:80",
        "10.0.0.1",
        "localhost.",
        "a:b",
        "[localhost]",
        "[127.0.0.1]",
        "[[127.0.0.1",
        "[::1",
        "::1",
        "127.0.0.1:99999",
        "127.0.0.1:+80",
        "localhost:80:80",
        "anna@localhost",
    ] {
        assert!(!is_loopback(host), "{host}");
    }
}

#[test]
fn only_the_owner_can_read_the_file() {
    let data = tempfile::tempdir().unwrap();
    for token in [new_token().unwrap(), new_token().unwrap()] {
        let endpoint = Endpoint {
            url: "http://127.0.0.1:1".into(),
            token: Some(token.clone()),
        };
        endpoint.write(data.path()).unwrap();
        let file = fs::metadata(Endpoint::path(data.path())).unwrap();
        assert_eq!(file.permissions().mode() & 0o777, 0o600);
        assert_eq!(token.len(), 64);
        assert_eq!(Endpoint::read(data.path()).unwrap().token, Some(token));
    }
    assert_ne!(new_token().unwrap(), new_token().unwrap());
    Endpoint::remove(data.path()).unwrap();
    assert!(Endpoint::read(data.path()).is_err());
}

/// A command in a copy of a data directory changed the store that runs in the original.
#[test]
fn copied_file_is_refused_and_a_moved_directory_is_not() {
    let place = tempfile::tempdir().unwrap();
    let (data, copy) = (place.path().join("data"), place.path().join("copy"));
    let endpoint = Endpoint {
        url: "http://127.0.0.1:1".into(),
        token: Some("secret".into()),
    };
    for directory in [&data, &copy] {
        fs::create_dir(directory).unwrap();
    }
    endpoint.write(&data).unwrap();
    fs::copy(Endpoint::path(&data), Endpoint::path(&copy)).unwrap();
    let refused = Endpoint::read(&copy).err().unwrap();
    assert_eq!(refused.kind(), io::ErrorKind::NotFound);
    assert!(refused.to_string().contains("copied"), "{refused}");
    let moved = place.path().join("moved");
    fs::rename(&data, &moved).unwrap();
    assert_eq!(Endpoint::read(&moved).unwrap().url, endpoint.url);
    // A file of an earlier version names no directory.
    fs::write(Endpoint::path(&copy), r#"{"url":"http://127.0.0.1:1"}"#).unwrap();
    assert_eq!(Endpoint::read(&copy).unwrap().url, endpoint.url);
}

#[test]
fn devices_are_compared_within_one_kernel() {
    let id = |boot: &str, device, inode| DirectoryId {
        boot: boot.to_owned(),
        device,
        inode,
    };
    let written = id("a", 1, 2);
    // The roots of two file systems often have one inode number.
    assert!(written.is_same(&id("a", 1, 2)) && !written.is_same(&id("a", 7, 2)));
    for other in ["b", ""] {
        assert!(written.is_same(&id(other, 7, 2)) && !written.is_same(&id(other, 1, 7)));
    }
    assert!(id("", 1, 2).is_same(&id("", 7, 2)));
}
