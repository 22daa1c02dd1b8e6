//! Tests of the encodings: a reader returns the written value, and no bytes can break it.

use proptest::prelude::*;

use crate::frame::put_record;
use crate::{
    Assembler, Chain, Description, Frame, HEAD_FORMAT, Head, Id, Kind, LogPosition, Malformed,
    MemberInfo, Role, SnapshotInfo, limits, records,
};

fn head() -> Head {
    Head {
        leader: "x".repeat(limits::HOST_NAME_BYTES_MAX),
        address: "y".repeat(limits::ADDRESS_BYTES_MAX),
        epoch: 3,
        change: 9,
        seq: 70,
        oldest: 50,
        position: LogPosition(900),
        snapshot: Some(SnapshotInfo {
            id: 49,
            first_seq: 50,
            first_position: LogPosition(600),
            previous: Chain([3; 32]),
            pieces: 4,
            bytes: 400_000,
            hash: [4; 32],
        }),
        ..Head::first(Id([1; 16]), 1_700_000_000_000)
    }
}

#[test]
fn largest_head_fits_its_limit_and_is_read_back() {
    let bytes = head().encode();
    assert!(bytes.len() <= limits::HEAD_BYTES_MAX, "{}", bytes.len());
    assert_eq!(Head::decode(&bytes), Ok(head()));
}

#[test]
fn head_of_a_later_format_is_refused() {
    let mut bytes = head().encode();
    bytes[0] = 2;
    let refused = Malformed::LaterFormat {
        format: 2,
        readable: HEAD_FORMAT,
    };
    assert_eq!(Head::decode(&bytes), Err(refused));
}

#[test]
fn cut_or_extended_head_is_refused() {
    let bytes = head().encode();
    for len in 0..bytes.len() {
        assert!(Head::decode(&bytes[..len]).is_err());
    }
    assert!(Head::decode(&[&bytes[..], &[0]].concat()).is_err());
}

fn frame(kind: Kind, epoch: u64, body: &[u8]) -> Frame<'_> {
    Frame {
        kind,
        epoch,
        seq: 5,
        first: LogPosition(8),
        count: 2,
        now_ms: 1,
        previous: Chain([9; 32]),
        body,
    }
}

#[test]
fn records_of_a_frame_are_read_back() {
    let mut body = Vec::new();
    put_record(&mut body, b"one");
    put_record(&mut body, b"");
    let bytes = frame(Kind::Whole, 1, &body).encode();
    let decoded = Frame::decode(&bytes).unwrap();
    assert_eq!(decoded, frame(Kind::Whole, 1, &body));
    assert_eq!(records(decoded.body, 2), Ok(vec![&b"one"[..], b""]));
    assert!(records(decoded.body, 1).is_err());
    assert!(records(decoded.body, 3).is_err());
}

#[test]
fn too_long_frame_is_refused() {
    let bytes = frame(Kind::Part, 1, &[]).encode();
    let body = vec![0; limits::FRAME_BODY_BYTES_MAX + 1];
    assert!(Frame::decode(&[bytes, body].concat()).is_err());
}

#[test]
fn group_in_parts_counts_with_its_last_part() {
    let mut assembler = Assembler::default();
    let accept =
        |it: &mut Assembler, frame: Frame<'_>| it.accept(&frame).unwrap().map(<[u8]>::to_vec);
    assert_eq!(accept(&mut assembler, frame(Kind::Part, 1, b"ab")), None);
    let whole = accept(&mut assembler, frame(Kind::LastPart, 1, b"c"));
    assert_eq!(whole.as_deref(), Some(&b"abc"[..]));
    assert_eq!(accept(&mut assembler, frame(Kind::Part, 1, b"de")), None);
    let whole = accept(&mut assembler, frame(Kind::LastPart, 1, b"f"));
    assert_eq!(whole.as_deref(), Some(&b"def"[..]));
}

#[test]
fn takeover_drops_an_unfinished_group() {
    let mut assembler = Assembler::default();
    let unfinished = frame(Kind::Part, 1, b"ab");
    assert_eq!(assembler.accept(&unfinished), Ok(None));
    let opening = frame(Kind::Whole, 2, b"x");
    assert_eq!(assembler.accept(&opening), Ok(Some(&b"x"[..])));
    let next = frame(Kind::LastPart, 2, b"c");
    assert_eq!(assembler.accept(&next), Ok(Some(&b"c"[..])));
}

fn member() -> MemberInfo {
    MemberInfo {
        host: "x".repeat(limits::HOST_NAME_BYTES_MAX),
        address: "y".repeat(limits::ADDRESS_BYTES_MAX),
        log_format: 1,
        process: Id([2; 16]),
        role: Role::Leading,
        epoch: 7,
        written_ms: 1_700_000_000_000,
        description: Description {
            version: "z".repeat(limits::VERSION_BYTES_MAX),
            settings: [5; 32],
            missing_modules: vec![[6; 32]; limits::MISSING_MODULES_MAX],
        },
    }
}

#[test]
fn largest_member_fits_its_limit_and_is_read_back() {
    let bytes = member().encode();
    assert!(bytes.len() <= limits::MEMBER_BYTES_MAX, "{}", bytes.len());
    assert_eq!(MemberInfo::decode(&bytes), Ok(member()));
    for len in 0..bytes.len() {
        assert!(MemberInfo::decode(&bytes[..len]).is_err());
    }
}

#[test]
fn too_long_description_is_cut() {
    let mut long = member();
    long.description.version = "ä".repeat(limits::VERSION_BYTES_MAX);
    long.description.missing_modules.push([7; 32]);
    let read = MemberInfo::decode(&long.encode()).unwrap().description;
    assert_eq!(read.version, "ä".repeat(limits::VERSION_BYTES_MAX / 2));
    assert_eq!(read.missing_modules, member().description.missing_modules);
}

proptest! {
    #[test]
    fn hostile_bytes_break_no_reader(bytes in prop::collection::vec(any::<u8>(), 0..600), count in any::<u32>()) {
        let _ = Head::decode(&bytes);
        let _ = MemberInfo::decode(&bytes);
        let _ = records(&bytes, count);
        if let Ok(frame) = Frame::decode(&bytes) {
            let _ = Assembler::default().accept(&frame);
        }
    }

    #[test]
    fn changed_member_is_refused_or_another_one(at in any::<usize>(), value in any::<u8>()) {
        let mut bytes = member().encode();
        let at = at % bytes.len();
        bytes[at] = value;
        if let Ok(member) = MemberInfo::decode(&bytes) {
            prop_assert_eq!(member.encode(), bytes);
        }
    }

    /// What is accepted has one encoding, so that equal heads are equal bytes.
    #[test]
    fn changed_head_is_refused_or_another_one(at in 0_usize..400, value in any::<u8>()) {
        let mut bytes = head().encode();
        let at = at % bytes.len();
        bytes[at] = value;
        if let Ok(head) = Head::decode(&bytes) {
            prop_assert_eq!(head.encode(), bytes);
        }
    }

    #[test]
    fn changed_frame_is_refused_or_another_one(at in 0_usize..80, value in any::<u8>()) {
        let mut bytes = frame(Kind::LastPart, 7, b"abcdefgh").encode();
        let at = at % bytes.len();
        bytes[at] = value;
        if let Ok(frame) = Frame::decode(&bytes) {
            prop_assert_eq!(frame.encode(), bytes);
        }
    }
}
