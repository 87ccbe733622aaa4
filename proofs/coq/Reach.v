(* T12: the share of the layers that backward reaches in exact mode, averaged over a cycle. *)
From Coq Require Import Reals Lra Psatz Lia.
From LCSB Require Import FinSum IdleCycle.
Open Scope R_scope.

(* p contiguous equal blocks: block j from the embedding needs the layers from j/p of the way up *)
Theorem reach_contiguous : forall p, (0 < p)%nat ->
  psum (fun j => 1 - INR j / INR p) p / INR p = (1 + 1 / INR p) / 2.
Proof.
  intros p Hp. assert (P : 0 < INR p) by (apply lt_0_INR; exact Hp).
  rewrite (psum_ext _ (fun j => 1 + - (/ INR p) * INR j)) by (intros; field; lra).
  rewrite psum_plus, psum_scal, psum_const, psum_INR. field. lra.
Qed.

(* interleaved: block j = layers j, j + p, ... of N; its lowest layer is j *)
Theorem reach_interleaved : forall p N, (0 < p <= N)%nat ->
  psum (fun j => 1 - INR j / INR N) p / INR p = 1 - (INR p - 1) / (2 * INR N).
Proof.
  intros p N [Hp HN]. assert (P : 0 < INR p) by (apply lt_0_INR; exact Hp).
  assert (Q : 0 < INR N) by (apply lt_0_INR; lia).
  rewrite (psum_ext _ (fun j => 1 + - (/ INR N) * INR j)) by (intros; field; lra).
  rewrite psum_plus, psum_scal, psum_const, psum_INR. field. lra.
Qed.

(* the layers' speed-up that follows, r_in and r_ad the input- and adapter-gradient shares of backward *)
Theorem exact_speedup : forall r_in r_ad p, 0 <= r_in -> 0 <= r_ad -> 1 <= p ->
  1 <= (1 + (r_in + r_ad)) / (1 + r_in * ((1 + 1 / p) / 2) + r_ad / p) < 2 * p.
Proof.
  intros r_in r_ad p Hi Ha Hp. assert (I : 0 < 1 / p <= 1).
  { split; [apply Rdiv_lt_0_compat; lra|]. apply Rmult_le_reg_r with p; [lra|]. replace (1 / p * p) with 1 by (field; lra). lra. }
  replace (r_ad / p) with (r_ad * (1 / p)) by (field; lra). set (u := 1 / p) in *.
  assert (U : u * p = 1) by (unfold u; field; lra).
  assert (D : 0 < 1 + r_in * ((1 + u) / 2) + r_ad * u) by nra.
  split.
  - apply Rmult_le_reg_r with (1 + r_in * ((1 + u) / 2) + r_ad * u); [exact D|].
    unfold Rdiv at 2. rewrite Rmult_assoc, Rinv_l by lra. nra.
  - apply Rmult_lt_reg_r with (1 + r_in * ((1 + u) / 2) + r_ad * u); [exact D|].
    unfold Rdiv at 1. rewrite Rmult_assoc, Rinv_l by lra.
    replace (2 * p * (1 + r_in * ((1 + u) / 2) + r_ad * u)) with (2 * p + r_in * p + r_in * (u * p) + 2 * r_ad * (u * p)) by field.
    rewrite U. nra.
Qed.
