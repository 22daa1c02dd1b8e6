use super::*;

fn access(users: bool) -> AccessConfig {
    AccessConfig {
        users: users.then(|| "users".into()),
        ..AccessConfig::default()
    }
}

fn flags(listen: &[&str]) -> ListenFlags {
    ListenFlags {
        listen: listen.iter().map(|it| it.parse().unwrap()).collect(),
        ..ListenFlags::default()
    }
}

fn certified(listen: &[&str]) -> ListenFlags {
    ListenFlags {
        tls_cert: Some("cert".into()),
        tls_key: Some("key".into()),
        ..flags(listen)
    }
}

#[test]
fn a_listener_is_an_address_with_or_without_a_scheme() {
    for (text, shown) in [
        ("127.0.0.1:1883", "mqtt://127.0.0.1:1883"),
        ("localhost:0", "mqtt://127.0.0.1:0"),
        ("mqtts://[::1]:8883", "mqtts://[::1]:8883"),
        ("ws://localhost:8080/", "ws://127.0.0.1:8080"),
        ("wss://0.0.0.0:443", "wss://0.0.0.0:443"),
    ] {
        assert_eq!(text.parse::<Listen>().unwrap().to_string(), shown);
    }
    for text in [
        "here",
        "http://127.0.0.1:1",
        "ws://127.0.0.1",
        "mqtt://:1",
        "ws://127.0.0.1:1/mqtt",
        "",
    ] {
        assert!(text.parse::<Listen>().is_err(), "{text}");
    }
}

#[test]
fn an_origin_has_no_path_and_no_wildcard() {
    let origin = "https://Panel.example:8443".parse::<Origin>().unwrap();
    assert_eq!(origin.0, "https://panel.example:8443");
    for text in [
        "https://me@panel.example",
        "https://me:443@panel.example",
        "https://panel.example?a",
        "https://panel.example#a",
        "https://panel.example:",
        "https://panel.example:x",
        "https://panel.example:65536",
        "https://:443",
        "https://pänel.example",
        "ftp://panel.example",
        "panel.example",
        "https://",
        "https://a/b",
        "https://a/",
        "*",
        "https://*.a",
        "null",
    ] {
        let error = text.parse::<Origin>().unwrap_err();
        let says = "write only scheme, host and port";
        assert!(error.contains(says), "{error}");
    }
}

/// Regression: such a value was accepted, but browsers omit the default port of the scheme.
#[test]
fn an_origin_has_no_default_port() {
    for (text, sent) in [
        ("https://panel.example:443", "https://panel.example"),
        ("http://panel.example:80", "http://panel.example"),
        ("http://[::1]:80", "http://[::1]"),
        ("http://[::80]", "http://[::80]"),
        ("https://panel.example:80", "https://panel.example:80"),
        ("http://panel.example:443", "http://panel.example:443"),
        ("http://panel.example:8080", "http://panel.example:8080"),
    ] {
        assert_eq!(text.parse::<Origin>().unwrap().0, sent);
    }
}

#[test]
fn a_reachable_listener_needs_tls_and_authentication() {
    let plain = "0.0.0.0:1883";
    let secure = || certified(&["mqtts://0.0.0.0:8883"]);
    let advice = "--listen mqtts://0.0.0.0:1883 --tls-cert FILE --tls-key FILE";
    for (flags, authenticates, says, omits) in [
        (
            flags(&["127.0.0.1:0", plain]),
            false,
            &["mqtt://0.0.0.0:1883", advice, "--users FILE", "--insecure"][..],
            None,
        ),
        (flags(&[plain]), true, &["--tls-cert FILE"], Some("--users")),
        (
            certified(&["wss://0.0.0.0:443"]),
            false,
            &["--users FILE"],
            Some("--tls-cert"),
        ),
        // TLS on one listener does not protect another one.
        (
            certified(&["mqtts://0.0.0.0:8883", "ws://0.0.0.0:80"]),
            true,
            &["ws://0.0.0.0:80", "wss://0.0.0.0:80;"],
            Some("0.0.0.0:8883"),
        ),
    ] {
        let error = flags.load(&access(authenticates), None).unwrap_err();
        let error = error.to_string();
        for part in says {
            assert!(error.contains(part), "no `{part}` in: {error}");
        }
        assert!(omits.is_none_or(|it| !error.contains(it)), "{error}");
    }

    let risky = ListenFlags {
        insecure: true.into(),
        ..flags(&[plain])
    };
    // A required certificate excludes anonymous clients.
    let required = ListenFlags {
        tls_client_ca: Some("ca".into()),
        tls_client_required: true.into(),
        ..secure()
    };
    let asked = AccessConfig {
        client_certificates: true,
        ..access(false)
    };
    let everybody = AccessConfig {
        allow_anonymous: true,
        ..access(true)
    };
    let local = flags(&["[::1]:1883", "ws://127.9.9.9:1"]);
    for (flags, access, is_ok) in [
        (secure(), access(true), true),
        (risky, access(false), true),
        (required, access(false), true),
        (secure(), asked, true),
        (secure(), everybody, false),
        (local, access(false), true),
    ] {
        let loaded = flags.load(&access, None);
        assert_eq!(loaded.is_ok(), is_ok, "{access:?}: {loaded:?}");
    }
}

#[test]
fn settings_that_would_do_nothing_are_refused() {
    let error = |flags: ListenFlags| flags.load(&access(true), None).unwrap_err();
    let local = || certified(&["mqtts://127.0.0.1:0"]);
    let unused = error(certified(&["127.0.0.1:0"]));
    assert_eq!(unused, ListenError::WithoutTls("tls_cert"));
    let half = ListenFlags {
        tls_key: None,
        ..local()
    };
    assert!(error(half).to_string().ends_with("add --tls-key FILE"));
    let none = error(flags(&["wss://127.0.0.1:0"])).to_string();
    assert!(none.contains("--tls-cert FILE and --tls-key FILE"));
    let stray = error(ListenFlags {
        tls_client_required: true.into(),
        ..local()
    });
    assert_eq!(stray, ListenError::WithoutClientCa("tls_client_required"));
    let stray = error(ListenFlags {
        ws_origin: vec![Origin("http://a".into())],
        ..flags(&[])
    });
    assert_eq!(stray, ListenError::WithoutWebSocket);
}

#[test]
fn errors_show_no_password() {
    let listen = |text: &str| text.parse::<Listen>().unwrap_err();
    let origin = |text: &str| text.parse::<Origin>().unwrap_err();
    for error in [
        listen("mqtt://u:SECRET@127.0.0.1:1"),
        listen("http://u:SECRET@127.0.0.1:1"),
        origin("https://u:SECRET@panel"),
    ] {
        let hides = error.contains("://***@") && !error.contains("SECRET");
        assert!(hides, "{error}");
    }
}

#[test]
fn an_admin_api_over_tls_needs_the_certificate_of_the_listeners() {
    let admin = Some(([0, 0, 0, 0], 8443).into());
    let error = flags(&[]).load(&access(true), admin).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("https://0.0.0.0:8443"), "{error}");
    assert!(error.contains("--tls-cert FILE"), "{error}");
    let config = certified(&[]).load(&access(true), admin).unwrap();
    assert!(config.tls.is_some());
    let error = certified(&[]).load(&access(true), None).unwrap_err();
    assert_eq!(error, ListenError::WithoutTls("tls_cert"));
}
