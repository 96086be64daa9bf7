//! The msgpack reader takes each form of the specification, and names what it can't take.

use omnitap::wire::msgpack::{Expected, MAX_DEPTH, MsgpackError, Reader};
use rstest::rstest;

/// All forms, each with the number of bytes that it takes.
#[rstest]
#[case::positive_fixint(&[0x7f])]
#[case::negative_fixint(&[0xe0])]
#[case::nil(&[0xc0])]
#[case::no(&[0xc2])]
#[case::yes(&[0xc3])]
#[case::uint8(&[0xcc, 1])]
#[case::uint16(&[0xcd, 1, 2])]
#[case::uint32(&[0xce, 1, 2, 3, 4])]
#[case::uint64(&[0xcf, 1, 2, 3, 4, 5, 6, 7, 8])]
#[case::int8(&[0xd0, 0x80])]
#[case::int16(&[0xd1, 0x80, 0])]
#[case::int32(&[0xd2, 0x80, 0, 0, 0])]
#[case::int64(&[0xd3, 0x80, 0, 0, 0, 0, 0, 0, 0])]
#[case::float32(&[0xca, 0, 0, 0, 0])]
#[case::float64(&[0xcb, 0, 0, 0, 0, 0, 0, 0, 0])]
#[case::fixstr(b"\xa3abc")]
#[case::str8(b"\xd9\x03abc")]
#[case::str16(b"\xda\x00\x03abc")]
#[case::str32(b"\xdb\x00\x00\x00\x03abc")]
#[case::bin8(b"\xc4\x02ab")]
#[case::bin16(b"\xc5\x00\x02ab")]
#[case::bin32(b"\xc6\x00\x00\x00\x02ab")]
#[case::fixext1(b"\xd4\x01a")]
#[case::fixext2(b"\xd5\x01ab")]
#[case::fixext4(b"\xd6\xffabcd")]
#[case::fixext8(b"\xd7\xffabcdefgh")]
#[case::fixext16(b"\xd8\x01abcdefghijklmnop")]
#[case::ext8(b"\xc7\x03\x05abc")]
#[case::ext16(b"\xc8\x00\x03\x05abc")]
#[case::ext32(b"\xc9\x00\x00\x00\x03\x05abc")]
#[case::empty_ext(b"\xc7\x00\x05")]
#[case::fixarray(&[0x92, 1, 2])]
#[case::array16(&[0xdc, 0, 2, 1, 2])]
#[case::array32(&[0xdd, 0, 0, 0, 2, 1, 2])]
#[case::fixmap(&[0x81, 1, 2])]
#[case::map16(&[0xde, 0, 1, 1, 2])]
#[case::map32(&[0xdf, 0, 0, 0, 1, 1, 2])]
#[case::nested(&[0x93, 0x81, 0xa1, b'a', 0x90, 0x92, 0x80, 0xc0, 7])]
fn skip_takes_each_form_to_its_last_byte(#[case] value: &[u8]) {
    let mut bytes = value.to_vec();
    bytes.push(0xc3);
    let mut reader = Reader::new(&bytes);
    assert_eq!(reader.skip(), Ok(()));
    assert_eq!(reader.offset(), value.len());
    assert_eq!(reader.bool(), Ok(true));
    // And not one byte less will do.
    for cut in 0..value.len() {
        let mut reader = Reader::of_head(&value[..cut], value.len() as u64);
        assert!(reader.skip().unwrap_err().is_truncated(), "cut to {cut}");
    }
}

#[rstest]
#[case(&[0], 0)]
#[case(&[0x7f], 127)]
#[case(&[0xcc, 0xff], 255)]
#[case(&[0xcd, 0xff, 0xff], 65_535)]
#[case(&[0xce, 0xff, 0xff, 0xff, 0xff], 4_294_967_295)]
#[case(&[0xcf, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], u64::MAX)]
#[case::a_signed_form_of_a_positive_number(&[0xd1, 0x01, 0x00], 256)]
fn unsigned(#[case] bytes: &[u8], #[case] value: u64) {
    assert_eq!(Reader::new(bytes).u64(), Ok(value));
}

#[rstest]
#[case(&[0xff], -1)]
#[case(&[0xe0], -32)]
#[case(&[0xd0, 0x80], -128)]
#[case(&[0xd1, 0x80, 0x00], -32_768)]
#[case(&[0xd2, 0x80, 0, 0, 0], -2_147_483_648)]
#[case(&[0xd3, 0x80, 0, 0, 0, 0, 0, 0, 0], i64::MIN)]
#[case(&[0xcd, 0x01, 0x00], 256)]
fn signed(#[case] bytes: &[u8], #[case] value: i64) {
    assert_eq!(Reader::new(bytes).i64(), Ok(value));
}

#[rstest]
#[case::float64(&[0xcb, 0x3f, 0xf8, 0, 0, 0, 0, 0, 0], 1.5)]
#[case::float32(&[0xca, 0x3f, 0xc0, 0, 0], 1.5)]
#[case::whole_number(&[0x05], 5.0)]
#[case::negative_whole_number(&[0xd0, 0xfb], -5.0)]
fn floats(#[case] bytes: &[u8], #[case] value: f64) {
    assert_eq!(Reader::new(bytes).f64(), Ok(value));
}

#[rstest]
#[case::array(&[0xc0], |r: &mut Reader<'_>| r.array(), Expected::Array)]
#[case::map(&[0x90], |r: &mut Reader<'_>| r.map(), Expected::Map)]
#[case::unsigned_below_zero(&[0xff], |r: &mut Reader<'_>| r.u64().map(|_| 0), Expected::Unsigned)]
#[case::signed_beyond_its_range(&[0xcf, 0xff, 0, 0, 0, 0, 0, 0, 0], |r: &mut Reader<'_>| r.i64().map(|_| 0), Expected::Integer)]
#[case::text(&[0xc4, 0], |r: &mut Reader<'_>| r.str().map(|_| 0), Expected::Str)]
#[case::bin(&[0xa0], |r: &mut Reader<'_>| r.bin().map(|_| 0), Expected::Bin)]
#[case::ext(&[0xc0], |r: &mut Reader<'_>| r.ext().map(|_| 0), Expected::Ext)]
#[case::number(&[0xa0], |r: &mut Reader<'_>| r.f64().map(|_| 0), Expected::Number)]
#[case::boolean(&[0x01], |r: &mut Reader<'_>| r.bool().map(|_| 0), Expected::Bool)]
#[case::never_used(&[0xc1], |r: &mut Reader<'_>| r.skip().map(|()| 0), Expected::Value)]
fn a_wrong_type_is_named_and_not_consumed(
    #[case] bytes: &[u8],
    #[case] read: fn(&mut Reader<'_>) -> Result<u32, MsgpackError>,
    #[case] expected: Expected,
) {
    let mut bytes = bytes.to_vec();
    bytes.insert(0, 0xc0);
    let mut reader = Reader::new(&bytes);
    reader.skip().unwrap();
    assert_eq!(
        read(&mut reader),
        Err(MsgpackError::WrongType {
            offset: 1,
            expected,
            marker: bytes[1]
        })
    );
    assert_eq!(reader.offset(), 1);
}

#[rstest]
#[case::array(&[0xdd, 0xff, 0xff, 0xff, 0xff])]
#[case::map(&[0xdf, 0xff, 0xff, 0xff, 0xff])]
#[case::map_of_half_pairs(&[0x82, 1, 2, 3])]
#[case::text(&[0xdb, 0xff, 0xff, 0xff, 0xff])]
#[case::bin(&[0xc6, 0xff, 0xff, 0xff, 0xff])]
#[case::ext(&[0xc9, 0xff, 0xff, 0xff, 0xff, 1])]
fn a_length_beyond_the_frame_is_too_long(#[case] bytes: &[u8]) {
    let error = Reader::new(bytes).skip().unwrap_err();
    assert!(
        matches!(error, MsgpackError::TooLong { offset: 0, .. }),
        "{error}"
    );
}

#[test]
fn a_length_beyond_what_was_captured_is_no_fault_of_the_frame() {
    let mut reader = Reader::of_head(&[0xdb, 0, 0, 1, 0, b'a'], 261);
    assert_eq!(reader.str(), Err(MsgpackError::Truncated { offset: 0 }));
}

#[rstest]
#[case::deepest(MAX_DEPTH, true)]
#[case::deeper(MAX_DEPTH + 1, false)]
#[case::far_deeper(1_000_000, false)]
fn depth_is_limited(#[case] depth: usize, #[case] is_read: bool) {
    let mut bytes = vec![0x91; depth];
    bytes.push(0xc0);
    let read = Reader::new(&bytes).skip();
    assert_eq!(read.is_ok(), is_read, "{read:?}");
    assert!(is_read || matches!(read, Err(MsgpackError::TooDeep { .. })));
}

#[test]
fn text_is_checked_to_be_utf8() {
    assert_eq!(
        Reader::new(b"\xa2\xff\xfe").str(),
        Err(MsgpackError::NotUtf8 { offset: 0 })
    );
    assert_eq!(Reader::new(b"\xa2\xff\xfe").str_bytes(), Ok(&b"\xff\xfe"[..]));
}

#[test]
fn an_extension_has_its_code_and_data() {
    assert_eq!(Reader::new(b"\xc7\x03\xffabc").ext(), Ok((-1, &b"abc"[..])));
    assert_eq!(Reader::new(b"\xd5\x03ab").ext(), Ok((3, &b"ab"[..])));
}
