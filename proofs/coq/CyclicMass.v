(* T6, kappa in cyclic order: the momenta hold at most kappa^2 = (1 - beta)(1 + beta^p)/((1 + beta)(1 - beta^p)) of
   the squared gradients put in. Potential: each coordinate's m^2 weighed by the steps until its block's next visit. *)
From Coq Require Import Reals Lra Psatz Lia PeanoNat.
From LCSB Require Import FinSum Vectors Blocks BlockDescent IdleMomentum IdleCycle UncoupledLimit Clock.
Open Scope R_scope.

Definition coherence (beta : R) (p : nat) : R := (1 - beta) * (1 + beta ^ p) / ((1 + beta) * (1 - beta ^ p)).

Section Mass.
Variables (n p : nat) (blk b : nat -> nat) (grad : vec -> vec) (eta beta : R) (x m : nat -> vec).
Hypothesis p_pos : (0 < p)%nat.
Hypothesis blk_lt : forall j, (j < n)%nat -> (blk j < p)%nat.
Hypothesis cyclic : forall t, b t = (t mod p)%nat.
Hypothesis beta01 : 0 < beta < 1.
Hypothesis run : idle_momentum blk b grad eta beta x m.
Hypothesis m0 : m 0%nat = (fun _ => 0).
Let g t := proj blk (b t) (grad (x t)).
Let q := beta ^ p.
Let weight (d : nat) := 1 / (1 - beta ^ 2) + (beta ^ 2) ^ d * (beta ^ 2 / (q * (1 - beta ^ 2))).

Lemma q01 : 0 < q < 1.
Proof. unfold q. pose proof (power_below_one beta p ltac:(lra) p_pos). pose proof (pow_lt beta p ltac:(lra)). lra. Qed.

Lemma weight_S d : weight (S d) = 1 + beta ^ 2 * weight d.
Proof. pose proof q01. unfold weight.
  replace ((beta ^ 2) ^ S d) with (beta ^ 2 * (beta ^ 2) ^ d) by reflexivity. field. split; nra.
Qed.

Lemma weight_last d : S d = p -> weight d = (1 + q) / (1 - beta ^ 2).
Proof.
  intros Hd. pose proof q01 as Q. unfold weight.
  assert (E : (beta ^ 2) ^ d * beta ^ 2 = q * q).
  { rewrite <- pow_mult, <- pow_add. unfold q. rewrite <- pow_add. f_equal. lia. }
  replace ((beta ^ 2) ^ d * (beta ^ 2 / (q * (1 - beta ^ 2)))) with ((beta ^ 2) ^ d * beta ^ 2 / (q * (1 - beta ^ 2)))
    by (field; split; nra).
  rewrite E. field. split; nra.
Qed.

Lemma weight_nonneg d : 0 <= weight d.
Proof.
  pose proof q01. assert (0 < 1 - beta ^ 2) by nra. unfold weight.
  apply Rplus_le_le_0_compat; [apply div_nonneg; lra|]. apply Rmult_le_pos; [apply pow_le, pow2_ge_0|].
  apply div_nonneg; [apply pow2_ge_0|apply Rmult_lt_0_compat; lra].
Qed.

(* one coordinate: idle steps balance exactly, a visit leaves a square *)
Lemma visit_square u v w : S w = p ->
  u ^ 2 + weight w * (beta * u + (1 - beta) * v) ^ 2 <= weight 0 * u ^ 2 + coherence beta p * v ^ 2.
Proof.
  intros Hw. rewrite (weight_last w Hw). unfold weight, coherence. fold q. pose proof q01 as Q. simpl ((beta ^ 2) ^ 0).
  apply Rminus_le.
  replace (u ^ 2 + (1 + q) / (1 - beta ^ 2) * (beta * u + (1 - beta) * v) ^ 2 -
    ((1 / (1 - beta ^ 2) + 1 * (beta ^ 2 / (q * (1 - beta ^ 2)))) * u ^ 2 +
     (1 - beta) * (1 + q) / ((1 + beta) * (1 - q)) * v ^ 2))
    with (- ((1 + q) / (1 - beta ^ 2) * (q / (1 - q)) * ((1 - q) * beta * u / q - (1 - beta) * v) ^ 2))
    by (field; repeat split; nra).
  assert (0 < 1 - beta ^ 2) by nra.
  assert (0 <= (1 + q) / (1 - beta ^ 2) * (q / (1 - q)) * ((1 - q) * beta * u / q - (1 - beta) * v) ^ 2)
    by (apply Rmult_le_pos; [apply Rmult_le_pos; apply div_nonneg; lra|apply pow2_ge_0]).
  lra.
Qed.

Let potential t := psum (fun j => weight (wait p t (blk j)) * m t j ^ 2) n.

Lemma potential_step t :
  nrm n (m t) ^ 2 + potential (S t) <= potential t + coherence beta p * nrm n (g t) ^ 2.
Proof.
  unfold potential. rewrite !nrm_sq. unfold dot. rewrite <- psum_scal, <- !psum_plus. apply psum_le. intros j Hj.
  destruct (run t) as [Hm _]. rewrite Hm. unfold g, axpy, proj. rewrite cyclic.
  specialize (blk_lt j Hj).
  destruct (Nat.eqb_spec (blk j) (t mod p)) as [E|E].
  - rewrite E. destruct (wait_visit p t p_pos) as [-> W].
    pose proof (visit_square (m t j) (grad (x t) j) _ W). lra.
  - rewrite (wait_idle p t (blk j)) by assumption. rewrite weight_S. right. ring.
Qed.

Lemma coherent_mass_pos T :
  psum (fun t => nrm n (m t) ^ 2) T <= coherence beta p * psum (fun t => nrm n (g t) ^ 2) T.
Proof.
  assert (P0 : potential 0 = 0).
  { unfold potential. rewrite m0. rewrite (psum_ext _ (fun _ => 0)) by (intros; ring). rewrite psum_const. ring. }
  assert (PT : 0 <= potential T).
  { apply psum_nonneg. intros. apply Rmult_le_pos; [apply weight_nonneg|apply pow2_ge_0]. }
  enough (H : psum (fun t => nrm n (m t) ^ 2) T + potential T
    <= coherence beta p * psum (fun t => nrm n (g t) ^ 2) T) by lra.
  clear PT. induction T as [|T IH]; [simpl psum; lra|]. rewrite !psum_S. pose proof (potential_step T). lra.
Qed.
End Mass.

Theorem coherent_mass : forall n p blk b grad eta beta x m, (0 < p)%nat ->
  (forall j, (j < n)%nat -> (blk j < p)%nat) -> (forall t, b t = (t mod p)%nat) -> 0 <= beta < 1 ->
  idle_momentum blk b grad eta beta x m -> m 0%nat = (fun _ => 0) -> forall T,
  psum (fun t => nrm n (m t) ^ 2) T
    <= coherence beta p * psum (fun t => nrm n (proj blk (b t) (grad (x t))) ^ 2) T.
Proof.
  intros n p blk b grad eta beta x m Hp Hblk Hc Hb Hr Hm T.
  destruct (Req_dec beta 0) as [->|Hne].
  - replace (coherence 0 p) with 1; [rewrite Rmult_1_l; apply (momentum_mass n blk b grad eta 0 x m); auto|].
    unfold coherence. rewrite pow_i by exact Hp. field.
  - apply (coherent_mass_pos n p blk b grad eta beta x m); auto. lra.
Qed.
