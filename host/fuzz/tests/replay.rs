//! Runs each target on its seeds, on earlier failing inputs, and on many mutations of both. A
//! failure prints the input.
#![allow(missing_docs, clippy::unwrap_used)]

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};

use statehouse_fuzz::{Target, mutate::mutate, target};

/// Mutations of each input. All targets together take some seconds without optimization.
const MUTATIONS: u64 = 300;

fn feed(target: &Target, input: &[u8]) {
    if catch_unwind(AssertUnwindSafe(|| (target.run)(input))).is_err() {
        panic!(
            "{} fails on b\"{}\"; add it as a file to host/fuzz/corpus/{}",
            target.name,
            input.escape_ascii(),
            target.name
        );
    }
}

fn replay(name: &str) {
    let target = target(name).unwrap();
    let mut inputs = (target.seeds)();
    assert!(!inputs.is_empty());
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(name);
    if let Ok(files) = fs::read_dir(corpus) {
        inputs.extend(files.map(|file| fs::read(file.unwrap().path()).unwrap()));
    }
    for (at, input) in inputs.iter().enumerate() {
        feed(target, input);
        let other = &inputs[(at + 1) % inputs.len()];
        for number in 0..MUTATIONS {
            feed(target, &mutate(input, other, number << 16 | at as u64));
        }
    }
}

macro_rules! replayed {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() {
            replay(stringify!($name));
        }
    )*};
}
replayed!(packets properties sessions requests clocks records journal settings);

#[test]
fn mutations_are_many_and_depend_only_on_the_number() {
    let (input, other) = (b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n", b"other");
    let all: std::collections::HashSet<_> = (0..MUTATIONS)
        .map(|number| mutate(input, other, number))
        .collect();
    assert!(all.len() > 200, "{}", all.len());
    assert_eq!(mutate(input, other, 7), mutate(input, other, 7));
}
